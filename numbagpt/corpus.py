"""A corpus that is already on the machine: the English prose of Python's own documentation.

Docstrings of the standard library, read from its source files (nothing is imported), and the
language reference that help() prints, pydoc_data.topics. Only paragraphs that read as English are
kept: no code, tables, lists of parameters, grammar or headings. A paragraph that was seen before is
left out too, so that the validation text is new to the model. About 1 MB of text, 230,000 tokens.

The same interpreter always gives the same corpus. It is made once and kept in the cache folder.
"""

import ast
import hashlib
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from numbagpt import cache
from numbagpt.errors import UserError
from numbagpt.shards import count_tokens, write_shard
from numbagpt.tokenizer import END_OF_TEXT, encode_array

# One document in this many is for validation.
VAL_EVERY = 10
MIN_CHARACTERS = 200_000

_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo"}
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (*_SCOPES, ast.If, ast.Try, ast.With)

_LINE = re.compile(r"(\s*)((?:[*+-]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+)?(\S.*)?")
# Words with three spaces between them stand in columns.
_COLUMN = re.compile(r"\S {3,}\S")
# reStructuredText: :role:`x`, ``x`` and `x`; *x* and **x**.
_MARKUP = re.compile(r"(?::[\w:]+:)?`+~?([^`]+)`+|\*{1,2}(\w[^*]*)\*{1,2}")
_WORD = re.compile(r"[\"'“(]*[^\W\d_]+(?:['’-][^\W\d_]+)*[\"'”).,;:!?]*")
_END = re.compile(r"[.!?][\"'”)]*$")
# What a list of parameters says of one: name -- description.
_PARAMETER = re.compile(r"\S+ --? ")
_COMMON = set(
    "a an and are as at be but by can for from has have if in is it its may must no not of on or "
    "other should so that the their then there these they this to was when which will with "
    "you".split()
)


def default_corpus() -> tuple[Path, Path]:
    """The train and validation shards of the default corpus; made if they are not in the cache.

    Raises UserError if the cache cannot be written or this Python has no library sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    # Another interpreter, or another version of this file, makes another corpus.
    recipe = f"{sys.version} {library}".encode() + Path(__file__).read_bytes()
    key = f"{platform.python_version()}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    folder = cache.cache_dir() / "corpus" / key
    paths = folder / "train.bin", folder / "val.bin"
    try:
        for path in paths:
            count_tokens(path)
    except UserError:
        _make(library, *paths)
    return paths


def library_documents(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the well documented modules of a library folder, by name.

    text   the docstrings in the order of the source, a blank line between them
    """
    names = (path.relative_to(library) for path in library.rglob("*.py"))
    for name in sorted(names, key=Path.as_posix):
        if not _SKIPPED.isdisjoint(name.parts):
            continue
        source = (library / name).read_bytes()
        # Parsing takes nearly all the time: not for a file with little to read in it.
        if 8 * sum(map(len, source.split(b'"""')[1::2])) < len(source):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        if text := "\n\n".join(_docstrings(tree)):
            yield name.as_posix(), text


def topic_documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every chapter that help() knows, by name."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    yield from sorted(topics.items())


def prose(text: str, seen: set[str]) -> str:
    """The paragraphs of a text that are English and not in `seen`; they are added to it.

    Each comes back as one line, no blank line between them: a small model learns which blanks
    follow each other long before it learns words, and would write little else.
    """
    kept = []
    for lines in _paragraphs(text):
        paragraph = _MARKUP.sub(r"\1\2", " ".join(" ".join(lines).split()))
        if paragraph not in seen and not any(map(_COLUMN.search, lines)) and is_english(paragraph):
            seen.add(paragraph)
            kept.append(paragraph)
    return "\n".join(kept)


def is_english(paragraph: str) -> bool:
    """Whether a paragraph is made of sentences: code, tables, grammar and headings are not.

    It begins with a capital and ends as a sentence does, four in five of its words are letters
    only, and one in seven is a word like "the": names and keywords in a row have none of those.
    """
    words = paragraph.split()
    return (
        len(words) >= 5
        and paragraph[0].isupper()
        and _END.search(paragraph) is not None
        and not any(mark in paragraph for mark in (">>>", "::", " = ", "=="))
        and _PARAMETER.match(paragraph) is None
        and 5 * sum(map(bool, map(_WORD.fullmatch, words))) >= 4 * len(words)
        and 7 * sum(word.lower() in _COMMON for word in words) >= len(words)
    )


def _paragraphs(text: str) -> Iterator[list[str]]:
    """The lines of each paragraph, without margins; one ends where the margin changes, too.

    An item of a list is a paragraph, its bullet or number a part of the margin.
    """
    lines: list[str] = []
    margin = 0
    for line in text.expandtabs().split("\n"):
        space, bullet, rest = _LINE.fullmatch(line).groups(default="")
        indent = len(space + bullet)
        if lines and (bullet or not rest or indent != margin):
            yield lines
            lines = []
        if rest:
            lines.append(rest)
            margin = indent
    if lines:
        yield lines


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _SCOPES) and (text := ast.get_docstring(node)):
        yield text
    for child in node.body:
        if isinstance(child, _BLOCKS):
            yield from _docstrings(child)


def _make(library: Path, train_path: Path, val_path: Path) -> None:
    folder = train_path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {folder}: {error.strerror}; set NUMBAGPT_CACHE to a folder that can be "
            "written to"
        ) from error
    print(f"making the default corpus from Python's documentation in {folder}")
    seen: set[str] = set()
    documents = [
        (name, text)
        for name, raw in (*library_documents(library), *topic_documents())
        if (text := prose(raw, seen))
    ]
    characters = sum(len(text) for _, text in documents)
    if characters < MIN_CHARACTERS:
        raise UserError(
            f"this Python has {characters:,} characters of documentation in {library}; expected "
            f"at least {MIN_CHARACTERS:,} for the default corpus; pass data of your own"
        )
    # By the hash of the name: related modules do not stand together, yet the order is fixed.
    documents.sort(key=lambda document: hashlib.sha256(document[0].encode()).digest())
    tokens = [np.append(np.uint16(END_OF_TEXT), encode_array(text)) for _, text in documents]
    train = [ids for i, ids in enumerate(tokens) if i % VAL_EVERY]
    # Two programs that do this at once write the same bytes, and each file appears whole.
    with cache.writing():
        write_shard(train_path, np.concatenate(train))
        write_shard(val_path, np.concatenate(tokens[::VAL_EVERY]))
