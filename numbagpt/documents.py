"""Documents out of text and JSON Lines files, plain or gzipped, a bounded piece at a time.

A text file is one document; of JSON Lines each line is one. Text is UTF-8 and is taken as it is,
line ends included; only a byte order mark is dropped. Empty documents are passed over.

A long text comes in pieces, cut where white space follows something else. GPT-2's words always end
there (numbagpt/tokenizer.py), so the tokens of the pieces are those of the text.
"""

import codecs
import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from numbagpt.errors import UserError
from numbagpt.files import explained, file_size, shell_path
from numbagpt.magics import GZIP, kind_of_file

BLOCK_BYTES = 2**18
# With no white space for so long, a text is cut anywhere: memory stays bounded.
MAX_HELD = 2**24
START_BYTES = 64  # enough to tell what kind of file it is

# Of file names, in small letters; all may be followed by .gz.
_TEXT, _JSON = (".txt",), (".jsonl", ".ndjson", ".json")
_KNOWN = ", ".join(_TEXT + _JSON)


class Piece(NamedTuple):
    """A stretch of text and whether a document begins with it."""

    text: str
    first: bool


def find_files(inputs: list[str]) -> list[Path]:
    """The files that inputs name; of a folder those known by their suffix, by name.

    Known are .txt, .jsonl, .ndjson, .json and these with .gz, in capitals as well. Links to folders
    are followed; what several names in a folder lead to is read once.

    Raises UserError for an input that is not there, a folder that cannot be read or has no such
    file, what has the name of one and is not, a file that would be read as text and begins like
    JSON Lines, and a file that two inputs lead to.
    """
    found: dict[tuple[int, int], Path] = {}
    for name in inputs:
        files = {}
        for path in _named_by(Path(name)):
            files.setdefault(_place(path), path)
        if twice := files.keys() & found.keys():
            path, before = min((files[place], found[place]) for place in twice)
            raise UserError(
                f"{path} is among the inputs twice{f', also as {before}' * (path != before)}; "
                "expected each text once, or it could be for training and for validation too; "
                "leave one out"
            )
        found |= files
    return list(found.values())


def _named_by(path: Path) -> list[Path]:
    """The files that one input names, each of them looked at."""
    if not path.is_dir():
        file_size(path)
        if _kind(path) not in _TEXT + _JSON:
            _check_not_json(path)
        return [path]
    known = sorted(file for file in _walk(path) if _kind(file) in _TEXT + _JSON)
    if not known:
        raise UserError(
            f"{path} has no file in it whose name ends in {_KNOWN}, or one of these and .gz; "
            "expected some; name files of other kinds one by one"
        )
    for file in known:
        file_size(file)  # a pipe would be waited for
    return known


def is_json(path: Path) -> bool:
    """Whether a file is read as JSON Lines: .jsonl, .ndjson, .json, or one of these with .gz."""
    return _kind(path) in _JSON


def without_gz(path: Path) -> Path:
    """The path less its .gz, if it has that."""
    return path.with_suffix("") if _is_gzip(path) else path


def read_pieces(
    path: Path, text_key: str = "text", advance: Callable[[int], object] = lambda count: None
) -> Iterator[Piece]:
    """Yield a file's documents in pieces.

    text_key   the field of a JSON line that holds the text
    advance    told how many bytes of the file were read since it was last called

    Raises UserError, naming the place, for what cannot be read: bytes that are not UTF-8, lines
    that are not JSON or have no such field, a gzip file that is damaged.
    """
    reached = 0
    for piece, position in _placed_pieces(path, text_key):
        advance(position - reached)
        reached = position
        yield piece


def _placed_pieces(path: Path, text_key: str) -> Iterator[tuple[Piece, int]]:
    """A file's pieces and how many bytes of it were read by then."""
    with _open(path) as (file, stream):
        documents = (
            _json_pieces(stream, path, text_key) if is_json(path) else _text_pieces(stream, path)
        )
        for piece in documents:
            yield piece, file.tell()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield a file and the stream of its content, the same if it is not gzipped.

    Inside the block, what goes wrong in reading becomes a UserError.
    """
    with explained(f"cannot read {path}"):
        try:
            with open(path, "rb") as file:
                if not _is_gzip(path):
                    yield file, file
                    return
                with gzip.open(file) as stream:
                    yield file, stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is not a whole gzip file: {error}; copy or make it again"
            ) from error


def _walk(top: Path) -> Iterator[Path]:
    """Everything below a folder that is not a folder, links followed."""

    def refuse(error: OSError) -> None:
        with explained(f"cannot read folder {error.filename}"):
            raise error

    seen = set()
    for folder, below, files in os.walk(top, onerror=refuse, followlinks=True):
        # A link may lead to a folder that was read before, even to one that it is in.
        if _place(folder) in seen:
            below.clear()
            continue
        seen.add(_place(folder))
        below.sort()  # which of two names comes first is not left to the file system
        yield from (Path(folder, file) for file in files)


def _place(path: str | os.PathLike) -> tuple[int, int]:
    """What tells a file or folder from all others, whatever names lead to it."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _kind(path: Path) -> str:
    """The suffix, in small letters, that says how a file is read, before .gz if there is one."""
    return without_gz(path).suffix.lower()


def _check_not_json(path: Path) -> None:
    """Raise UserError if the first line is a JSON object: nobody means its braces as text."""
    with _open(path) as (_, stream):
        line = stream.readline(MAX_HELD)
    try:
        is_object = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return
    if is_object:
        gz = path.suffix if _is_gzip(path) else ""
        raise UserError(
            f"{path} would be read as text and its first line is a JSON object; rename it to end "
            f"in .jsonl{gz} for JSON Lines, in .txt{gz} for text"
        )


def _text_pieces(stream: BinaryIO, path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, first, read = "", True, 0
    while True:
        block = stream.read(BLOCK_BYTES)
        unfinished = len(decoder.getstate()[0])
        try:
            held += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, read - unfinished + error.start) from error
        read += len(block)
        if first:
            held = held.removeprefix("\ufeff")
        end = _word_end(held) if block and len(held) < MAX_HELD else len(held)
        if end:
            yield Piece(held[:end], first)
            held, first = held[end:], False
        if not block:
            return


def _word_end(text: str) -> int:
    """The last place where a space or line end follows something else; 0 if there is none."""
    backwards = re.search(r"[ \n]\S", text[::-1])
    return len(text) - 1 - backwards.start() if backwards else 0


def _json_pieces(stream: BinaryIO, path: Path, key: str) -> Iterator[Piece]:
    read = 0
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8").rstrip()
        except UnicodeDecodeError as error:
            raise _not_utf8(path, read + error.start) from error
        read += len(line)
        if number == 1:
            text = text.removeprefix("\ufeff")
        if text:
            yield from _json_document(text, f"{path}, line {number}:", key)


def _json_document(line: str, where: str, key: str) -> Iterator[Piece]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(
            f"{where} invalid JSON{place} ({getattr(error, 'msg', error)}); " + _expected_json(line)
        ) from error
    if not isinstance(entry, dict):
        raise UserError(f"{where} JSON of type {type(entry).__name__}; {_expected_json(line)}")
    if key not in entry:
        names = ", ".join(list(entry)[:5]) or "none"
        raise UserError(
            f"{where} no field '{key}' among its fields ({names}); name the one with the text: "
            "--text_key FIELD"
        )
    if not isinstance(entry[key], str):
        raise UserError(
            f"{where} field '{key}' is of type {type(entry[key]).__name__}; expected a string"
        )
    if entry[key]:
        yield Piece(entry[key], first=True)


def _expected_json(line: str) -> str:
    fix = "; an array is made into them by: jq -c '.[]' FILE" if line.startswith("[") else ""
    return f"expected JSON Lines, one object a line{fix}"


def _not_utf8(path: Path, byte: int) -> UserError:
    with _open(path) as (_, stream):
        start = stream.read(START_BYTES)
    kind = kind_of_file(start)
    if start.startswith(GZIP) and not _is_gzip(path):
        return UserError(
            f"{path} is gzipped; expected a name that says so and what is in it; rename it to end "
            "in .txt.gz or .jsonl.gz"
        )
    if kind and kind != "text":
        return UserError(f"{path} is {kind}; expected UTF-8 text; give files with text")
    return UserError(
        f"{path} is not UTF-8 at byte {byte:,}; expected UTF-8 text; "
        f"convert it with: iconv -f ENCODING -t UTF-8 {shell_path(path)}"
    )
