"""Make token shards from text: `python -m numbagpt.data INPUT... --output_dir DIR`.

    python -m numbagpt.data book.txt --output_dir data
    python -m numbagpt.data web/ more.jsonl.gz --output_dir data --name web --val_documents 500
    python -m numbagpt.data tinyshakespeare --output_dir data

INPUT is a file or a folder that is searched for .txt, .jsonl, .ndjson, .json and the same with .gz.
No file may be among them twice. A text file is one document, and so is each line of JSON Lines
(field --text_key). Every document begins with <|endoftext|>. The tokens go to
DIR/NAME_train_000000.bin, … and DIR/NAME_val_000000.bin, … in the order of the inputs; nothing
appears there until all of it is done.

Which documents are for validation depends on their number alone, so that the same inputs always
give the same shards. Document i, counted from 0, is one if ceil((i+1) F) > ceil(i F), where F is
--val_fraction (0.1: documents 0, 10, 20, …); or if i < --val_documents. Empty ones do not count. A
single document is cut by F instead: its last part, F of its characters from the next line on, is
the validation document. F = 0: no validation.

The name tinyshakespeare stands for that data set, fetched from the network, with the documents and
the split of llm.c: the first 32,768 tokens are for validation.
"""

if __name__ == "__main__":  # before the imports, so that Ctrl-C is answered while they last
    import sys

    from numbagpt import program

    sys.exit(program.run_module("numbagpt.data"))

import argparse
import glob
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from numbagpt import flags, tinyshakespeare
from numbagpt.documents import Piece, find_files, read_pieces, without_gz
from numbagpt.errors import UserError
from numbagpt.files import file_size, shell_path
from numbagpt.shard_writer import ShardWriter, open_shards
from numbagpt.shards import MAX_TOKENS
from numbagpt.tokenizer import END_OF_TEXT, encode_array

DEFAULT_FRACTION = Fraction(1, 10)
MIN_SHARD_TOKENS = 1024  # smaller ones are no use to train on, and very many files
MAX_DIGITS = 18  # of --val_fraction; no data set has more documents
# One task of a worker: long enough to be worth handing over, short enough to end soon on Ctrl-C.
TASK_CHARACTERS = 2**18


class Part(NamedTuple):
    """A piece of a document and the split it goes to: train or val."""

    split: str
    piece: Piece


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = flags.Parser(__doc__)
    parser.prog = "python -m numbagpt.data"
    parser.add_argument(
        "inputs",
        nargs="+",
        type=flags.path,
        metavar="INPUT",
        help="file, folder or tinyshakespeare",
    )
    parser.add_argument("--output_dir", type=flags.path, required=True, metavar="DIR")
    split = parser.add_mutually_exclusive_group()
    split.add_argument(
        "--val_fraction", type=_fraction, metavar="F", help="for validation (default: 0.1)"
    )
    split.add_argument(
        "--val_documents", type=flags.number(int, 1), metavar="N", help="the first N for validation"
    )
    parser.add_argument(
        "--shard_tokens",
        type=flags.number(int, MIN_SHARD_TOKENS, MAX_TOKENS),
        default=100_000_000,
        metavar="N",
        help="tokens of a shard (default: 100,000,000)",
    )
    parser.add_argument("--text_key", default="text", help="field of a JSON line (default: text)")
    parser.add_argument(
        "--workers",
        type=flags.number(int, 1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="threads that tokenize; the result does not depend on it (default: one a core)",
    )
    parser.add_argument(
        "--name", type=_name, help="of the shards (default: that of a single input, or data)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace shards of that name")
    return parser.parse_intermixed_args(argv)


def _fraction(text: str) -> Fraction:
    try:
        # A Fraction writes 1e-99999999 out, digit by digit: its power of ten is looked at before.
        if "/" not in text and abs(Decimal(text).adjusted()) > MAX_DIGITS:
            raise ValueError
        value = Fraction(text)
    except (ValueError, ArithmeticError):
        value = Fraction(1)
    if value and not Fraction(1, 10**MAX_DIGITS) <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1e-{MAX_DIGITS} to below 1, or 0"
        )
    return value


def _name(text: str) -> str:
    if not text.strip(".") or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not the beginning of a file name")
    return text


def run(args: argparse.Namespace) -> int:
    """Make the shards that the arguments ask for and say how to train on them."""
    tiny = tinyshakespeare.NAME in args.inputs and not Path(tinyshakespeare.NAME).exists()
    if tiny and len(args.inputs) > 1:
        raise UserError(
            "tinyshakespeare is fetched by itself, and there is no file of that name; give it no "
            "other INPUT beside it"
        )
    files = [] if tiny else find_files(args.inputs)
    name = args.name or _name_of(args.inputs)
    with open_shards(Path(args.output_dir), name, args.shard_tokens, args.overwrite) as writer:
        if tiny:
            write_tinyshakespeare(writer, args)
        else:
            write_files(files, writer, args)
        if not writer.num_tokens:
            raise UserError(
                "there is no text in the input, all its documents are empty; "
                "expected some; give files with text"
            )
        if "train" not in writer.num_tokens:
            fix = "a smaller --val_fraction or, for no validation, --val_fraction 0"
            if args.val_documents is not None:
                fix = "a smaller --val_documents, or leave it out, to cut a single document in two"
            raise UserError(
                "all the text would be for validation, none is left to train on; give more "
                f"documents, {fix}"
            )
    command = "python train.py"
    for split, flag in (("train", "--input_bin"), ("val", "--input_val_bin")):
        if split in writer.num_tokens:
            # Not *: it would take the shards of a data set called NAME_train_x as well.
            shards = glob.escape(os.path.join(args.output_dir, f"{name}_{split}_")) + "??????.bin"
            print(f"{shards}: {writer.num_tokens[split]:,} tokens")
            command += f" {flag} {shell_path(shards)}"
    print(f"train on them: {command}")
    return 0


def write_tinyshakespeare(writer: ShardWriter, args: argparse.Namespace) -> None:
    """Fetch the data set and write its two splits, which are fixed."""
    if args.val_fraction is not None or args.val_documents is not None:
        raise UserError(
            "tinyshakespeare has a split of its own; leave out --val_fraction and --val_documents"
        )
    train, val = tinyshakespeare.tokenize(tinyshakespeare.load_text())
    writer.write("train", train)
    writer.write("val", val)


def write_files(files: list[Path], writer: ShardWriter, args: argparse.Namespace) -> None:
    """Read, split, tokenize and write documents, all at the same time, a bounded piece each."""
    fraction = DEFAULT_FRACTION if args.val_fraction is None else args.val_fraction
    size = sum(map(file_size, files))
    # No bar where stderr is not a terminal (None: tqdm looks), or is closed.
    no_bar = None if sys.stderr else True
    with tqdm(total=size, unit="B", unit_scale=True, disable=no_bar) as bar:
        pieces = chain.from_iterable(read_pieces(path, args.text_key, bar.update) for path in files)
        if args.val_documents is not None:
            parts = split_documents(pieces, lambda i: i < args.val_documents)
        elif fraction and (length := single_length(files, args.text_key)):
            parts = split_text(pieces, int(length * (1 - fraction)))
        else:
            parts = split_documents(
                pieces, lambda i: math.ceil((i + 1) * fraction) > math.ceil(i * fraction)
            )
        for split, tokens in tokenize(parts, args.workers):
            writer.write(split, tokens)


def single_length(files: list[Path], text_key: str) -> int | None:
    """The characters of the only document in the files, 0 if there is none; None if there are more.

    Reads no further than to where the second begins, the smallest files first.
    """
    documents, length = 0, 0
    by_size = sorted(files, key=file_size)
    for piece in chain.from_iterable(read_pieces(path, text_key) for path in by_size):
        documents += piece.first
        if documents > 1:
            return None
        length += len(piece.text)
    return length


def split_documents(pieces: Iterable[Piece], is_val: Callable[[int], bool]) -> Iterator[Part]:
    """Send whole documents to val or train by their number, counted from 0."""
    document = -1
    for piece in pieces:
        document += piece.first
        yield Part("val" if is_val(document) else "train", piece)


def split_text(pieces: Iterable[Piece], cut: int) -> Iterator[Part]:
    """Send the first `cut` characters of a text, and the line they end in, to train; val the rest.

    The rest begins a document. If no line ends after `cut` in that piece, the cut is at `cut`.
    """
    split, before = "train", 0
    for piece in pieces:
        text = piece.text
        if split == "train" and before + len(text) > cut:
            at = text.find("\n", cut - before) + 1
            if not 0 < at < len(text):
                at = cut - before
            if at:
                yield Part("train", Piece(text[:at], piece.first))
            split, piece = "val", Piece(text[at:], first=True)
        before += len(text)
        yield Part(split, piece)


def tokenize(parts: Iterable[Part], workers: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (split, ids) of the parts, in order; a document's first begins with <|endoftext|>.

    The workers are threads: tiktoken lets go of the interpreter while it works.
    """
    running: deque[Future] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for task in _tasks(parts):
            running.append(pool.submit(_encode, task))
            if len(running) > 2 * workers:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def _tasks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    task, size = [], 0
    for part in parts:
        task.append(part)
        size += len(part.piece.text)
        if size >= TASK_CHARACTERS:
            yield task
            task, size = [], 0
    yield task


def _encode(task: list[Part]) -> list[tuple[str, np.ndarray]]:
    start = np.array([END_OF_TEXT], np.uint16)
    return [
        (split, np.concatenate([start[: piece.first], encode_array(piece.text)]))
        for split, piece in task
    ]


def _name_of(inputs: list[str]) -> str:
    """What a single input is called, without .gz and .txt or the like; data if that is no name."""
    if len(inputs) > 1:
        return "data"
    path = Path(inputs[0]).resolve()
    name = path.name if path.is_dir() else without_gz(path).stem
    return name if name.strip(".") else "data"


def main(argv: list[str] | None = None) -> int:
    """Make shards as the command line says; returns the exit status."""
    return run(parse_args(argv))
