"""Shards: files of token ids in llm.c's .bin format.

    bytes 0 … 1023   256 int32: magic 20240520, version 1, number of tokens, then zeros
    bytes 1024 …     the tokens, uint16

All little-endian. A data set is one shard or many. Of a shard only the tokens that are asked for
are read, so its size does not matter. It is not mapped into memory: what is missing from a mapped
file that was cut short meanwhile ends the process.
"""

import os
import struct
from typing import BinaryIO

import numpy as np

from numbagpt.config import VOCAB_SIZE
from numbagpt.errors import UserError
from numbagpt.files import atomic_write, explained, file_size, read_bytes, shell_path
from numbagpt.magics import SHARD_MAGIC, kind_of_file
from numbagpt.words import counted

VERSION = 1
HEADER_BYTES = 1024
TOKEN = np.dtype("<u2")
MAX_TOKENS = 2**31 - 1

_MAKE = "make shards from text with: python -m numbagpt.data INPUT --output_dir DIR"
_LEAVE_ALONE = "leave the shards of a run alone until it ends"


def write_header(file: BinaryIO, num_tokens: int) -> None:
    """Write the 1024 bytes of header where the file stands."""
    file.write(struct.pack("<3i", SHARD_MAGIC, VERSION, num_tokens).ljust(HEADER_BYTES, b"\0"))


def write_shard(path: str | os.PathLike, tokens: np.ndarray) -> None:
    """Write token ids, (n,) of any integer dtype, as one shard; atomic.

    Raises UserError if the file cannot be written or an id does not fit in 16 bits.
    """
    tokens = np.asarray(tokens)
    if tokens.size > MAX_TOKENS:
        raise UserError(f"{tokens.size:,} tokens for one shard; expected at most {MAX_TOKENS:,}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**16:
        raise UserError(
            f"token ids {tokens.min()} to {tokens.max()} for {path}; expected 0 to {2**16 - 1}"
        )
    with atomic_write(path) as file:
        write_header(file, tokens.size)
        file.write(np.ascontiguousarray(tokens, TOKEN).data)


def count_tokens(path: str | os.PathLike) -> int:
    """The number of tokens of a shard, at least 1; what they are is not looked at.

    Raises UserError if the file cannot be read, is not a shard, or is not whole.
    """
    size = file_size(path)
    if size == 0:
        raise UserError(f"{path} is empty; expected a token shard; {_MAKE}")
    if size < 12:
        raise UserError(
            f"{path} is not a token shard: it has only {counted(size, 'byte')}; {_MAKE}"
        )
    magic, version, num_tokens = struct.unpack("<3i", read_bytes(path, 12))
    if magic != SHARD_MAGIC:
        raise UserError(f"{path} is not a token shard: {_what_it_is(path, magic)}")
    if version != VERSION:
        raise UserError(f"{path} has shard version {version}; expected version {VERSION}; {_MAKE}")
    if size < HEADER_BYTES:
        raise UserError(
            f"{path} ends inside its header, at byte {size} of {HEADER_BYTES}; "
            "copy or make it again"
        )
    if size % 2:
        raise UserError(
            f"{path} has an odd size, {size:,} bytes; expected 2 bytes a token; "
            "copy or make it again"
        )
    held = (size - HEADER_BYTES) // 2
    if held != num_tokens:
        raise UserError(
            f"{path} holds {counted(held, 'token')}; its header says {num_tokens:,}; "
            f"{'the file is cut short; ' if held < num_tokens else ''}copy or make it again"
        )
    if held == 0:
        raise UserError(f"{path} holds no tokens; {_MAKE}")
    return held


def check_unchanged(path: str | os.PathLike, num_tokens: int) -> None:
    """Raise UserError unless the shard still has `num_tokens`, which count_tokens once said."""
    if (found := count_tokens(path)) != num_tokens:
        raise UserError(
            f"{path} has {counted(found, 'token')}; it had {num_tokens:,} when it was first looked "
            f"at; {_LEAVE_ALONE}"
        )


def read_tokens(path: str | os.PathLike, start: int, count: int) -> np.ndarray:
    """`count` tokens of a shard from its token `start` on, (count,) uint16.

    They are known to be there. Raises UserError if the file cannot be read or ends too early.
    """
    with explained(f"cannot read {path}"):
        tokens = np.fromfile(path, TOKEN, count, offset=HEADER_BYTES + TOKEN.itemsize * start)
    if tokens.size != count:
        raise UserError(
            f"{path} ends at token {start + tokens.size:,}; it was longer when it was first looked "
            f"at; {_LEAVE_ALONE}"
        )
    return tokens


def check_vocabulary(
    tokens: np.ndarray, vocab_size: int, path: str | os.PathLike, start: int
) -> None:
    """Raise UserError if an id is ≥ vocab_size, naming the file and the first such place.

    tokens   (n,) uint16, n ≥ 1: those of the shard `path` from its token `start` on
    """
    if tokens.max() >= vocab_size:
        first = int(np.argmax(tokens >= vocab_size))
        raise UserError(
            f"{path} has token id {tokens[first]} at position {start + first:,}; "
            f"expected ids below the model's vocabulary of {vocab_size}; "
            "use the tokenizer the model was made for"
        )


def _what_it_is(path: str | os.PathLike, magic: int) -> str:
    """Guess what a file without our magic is, and say what to do with it."""
    start = read_bytes(path, 2 * HEADER_BYTES)
    kind = kind_of_file(start)
    if kind == "text":
        command = f"python -m numbagpt.data {shell_path(path)} --output_dir DIR"
        return f"it is text; make a shard with: {command}"
    if kind:
        return f"it is {kind}; expected magic {SHARD_MAGIC}; {_MAKE}"
    for stored, maker in (("int32", "llm.c's first versions"), ("uint16", "nanoGPT")):
        ids = np.frombuffer(start[: len(start) // 4 * 4], np.dtype(stored).newbyteorder("<"))
        # Id 0 is "!": text is not full of it, foreign headers are.
        if 0 <= ids.min() <= ids.max() < VOCAB_SIZE and 2 * np.count_nonzero(ids) > ids.size:
            return (
                f"it looks like bare {stored} tokens without a header, as {maker} wrote them; add "
                f"one: numbagpt.shards.write_shard(NEW, numpy.fromfile({str(path)!r}, {stored!r}))"
            )
    return f"it starts with {magic}; expected magic {SHARD_MAGIC}; {_MAKE}"
