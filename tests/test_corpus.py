"""The default corpus: what it takes from a library, what it leaves out, and how it is kept."""

import errno
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shard_files import read_shard

from numbagpt import corpus
from numbagpt.errors import UserError
from numbagpt.tokenizer import END_OF_TEXT, decode

MODULE = '''
"""First,
    the module.
"""
import sys
if sys.platform:
    def function():
        """Second, a function: \\x41 to Z."""
        x = """not a docstring"""
        class Inner:
            "Third, a class in it."
try:
    class Outer:
        r"""Fourth, a raw \\one."""
        async def method(self):
            """Fifth, a coroutine."""
except ImportError:
    pass
'''


@pytest.fixture
def library(tmp_path):
    """A small library, good and bad modules in it."""
    folder = tmp_path / "library"
    for name, source in {
        "b.py": MODULE,
        "a/deep.py": '"""Deep."""',
        "broken.py": '"""Broken.""" if',
        "null.py": '"""Null."""\0',
        "latin.py": '# coding: latin-1\n"""Caf\xe9."""',
        "sparse.py": '"""Sparse."""\n' + "x = 1\n" * 100,
        "tests/t.py": '"""A test."""',
        "c/idlelib/i.py": '"""An editor."""',
        "notes.txt": '"""Not Python."""',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source.encode("latin-1"))
    return folder


def use_library(monkeypatch, folder):
    """Let the standard library be one folder: a part of it by name, or any other."""
    path = Path(os.__file__).parent / folder
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(path)}.get)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, a library that is quick to read, and all topics."""
    use_library(monkeypatch, "email")
    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(cache, monkeypatch):
    """The same with few modules and topics: a corpus made in no time."""
    use_library(monkeypatch, "wsgiref")
    topics = list(corpus.topic_documents())[::10]
    monkeypatch.setattr(corpus, "topic_documents", lambda: topics)
    monkeypatch.setattr(corpus, "MIN_CHARACTERS", 1000)
    return cache


def files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_docstrings_come_in_the_order_of_the_source(library):
    assert list(corpus.library_documents(library)) == [
        ("a/deep.py", "Deep."),
        (
            "b.py",
            "First,\nthe module.\n\nSecond, a function: A to Z.\n\n"
            "Third, a class in it.\n\nFourth, a raw \\one.\n\nFifth, a coroutine.",
        ),
        ("latin.py", "Café."),
    ]


def test_prose_is_one_line_a_paragraph():
    text = (
        "A title\n*******\n\nThis is  one paragraph,  \nin two lines.\n\n"
        "  \tThis is another, at a margin,\n\tand it has two lines. And\n\ttwo sentences.\n\n\n"
        "* An item of a list, it is\n  in two lines as well.\n* Another item of the list.\n"
        "10. The tenth item of a list.\n"
        "(b) The item is not to begin with\n    it. And it is so."
    )
    assert corpus.prose(text, set()).split("\n") == [
        "This is one paragraph, in two lines.",
        "This is another, at a margin, and it has two lines. And two sentences.",
        "An item of a list, it is in two lines as well.",
        "Another item of the list.",
        "The tenth item of a list.",
        "The item is not to begin with it. And it is so.",
    ]


def test_prose_has_no_markup():
    text = "The :meth:`read` of a :py:class:`~io.Raw`, ``size`` is *never* of **any** `use` to it."
    plain = "The read of a io.Raw, size is never of any use to it."
    assert corpus.prose(text, set()) == plain


def test_prose_ends_where_the_margin_changes():
    text = "This is a sentence of the text.\n    x = f(y)\n    z = x\nAnd this is the end of it."
    assert corpus.prose(text, set()) == (
        "This is a sentence of the text.\nAnd this is the end of it."
    )


@pytest.mark.parametrize(
    "paragraph",
    [
        "The name      what it is for\nThe value     what it is in the end.",
        ">>> it is in the list\n... or is it not",
        "A doctest is in the text, >>> it is so.",
        "A rule ::= the name of a rule.",
        "Name -- the name that it has in the list.",
        "Name - the name that it has in the list.",
        "The size = the number of the bytes.",
        "The end of this is a colon, so that a sample will follow:",
        "the beginning of this is small, so it is the rest of a sentence.",
        "Is it a heading of the text",
        "Is a short one.",
        "Widget Frame Button Label Entry Canvas Listbox Scrollbar Menu.",
        "To f(x), g[1], a.b, x_1 and is_it the same in 3, 4 or 5.",
        "----- ----- ----- ----- -----",
    ],
)
def test_prose_leaves_out_what_is_no_english(paragraph):
    assert not corpus.prose(paragraph, set())
    around = "This is the text before it.", "This is the text after it."
    text = f"{around[0]}\n\n{paragraph}\n\n{around[1]}"
    assert corpus.prose(text, set()).split("\n") == [*around]


@pytest.mark.parametrize(
    "paragraph",
    [
        "Is this the end of it?",
        'It calls "f(x)" for each of the items in the list.',
        "The café's well-known owner (who “is” in) can’t be on it!",
        "Look at the first item -- or at the last.",
    ],
)
def test_prose_keeps_english(paragraph):
    assert corpus.prose(paragraph, set()) == paragraph


def test_prose_leaves_out_what_was_seen():
    old, new, newer = (f"This is the {age} text." for age in ("old", "new", "newer"))
    seen = {old}
    assert corpus.prose(f"{new}\n\n{old}\n\n{new}\n\n{newer}", seen) == f"{new}\n{newer}"
    assert seen == {old, new, newer}
    assert corpus.prose(f"{new}\n\n{old}", seen) == ""


def test_corpus_is_english_in_two_parts_that_share_no_paragraph(cache, capsys):
    train, val = (read_shard(path) for path in corpus.default_corpus())
    assert capsys.readouterr().out.count("\n") == 1
    assert train[0] == val[0] == END_OF_TEXT
    assert max(train.max(), val.max()) == END_OF_TEXT
    assert len(train) > 40_000
    assert len(val) > 4096
    documents = [decode(part).split("<|endoftext|>")[1:] for part in (train, val)]
    # One in ten, from the first on.
    assert len(documents[1]) == -(-(len(documents[0]) + len(documents[1])) // 10)
    assert all(text.strip() for part in documents for text in part)
    paragraphs = [{p for text in part for p in text.split("\n")} for part in documents]
    assert not paragraphs[0] & paragraphs[1]
    everything = paragraphs[0] | paragraphs[1]
    assert all(corpus.is_english(paragraph) for paragraph in everything)
    assert not any("  " in p or p != p.strip() for p in everything)
    letters = sum(c.isalpha() or c == " " for p in everything for c in p)
    assert letters > 0.93 * sum(map(len, everything))
    # A sentence of the language reference and a docstring of the email package.
    assert any(
        'The "with" statement is used to wrap the execution of a block with' in paragraph
        for paragraph in everything
    )
    assert "Return the entire formatted message as a string." in everything


def test_corpus_is_made_once_and_always_the_same(small, monkeypatch, capsys):
    paths = corpus.default_corpus()
    assert paths == corpus.default_corpus()
    assert capsys.readouterr().out.count("making") == 1
    first = files(small)
    assert sorted(first) == ["train.bin", "val.bin"]
    monkeypatch.setenv("NUMBAGPT_CACHE", str(small.parent / "other"))
    corpus.default_corpus()
    assert files(small.parent / "other") == first


def test_two_first_uses_at_once_do_not_clash(small):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: corpus.default_corpus(), range(2))
    assert first == second
    assert sorted(files(small)) == ["train.bin", "val.bin"]
    assert all(len(read_shard(path)) for path in first)


@pytest.mark.parametrize("harm", ["remove", "truncate"])
def test_a_damaged_corpus_is_made_again(small, harm):
    train, val = corpus.default_corpus()
    whole = files(small)
    if harm == "remove":
        train.unlink()
    else:
        os.truncate(val, 2000)
    assert corpus.default_corpus() == (train, val)
    assert files(small) == whole


def test_another_library_has_another_corpus(small, monkeypatch):
    train, _ = corpus.default_corpus()
    use_library(monkeypatch, "json")
    other, _ = corpus.default_corpus()
    assert other.parent != train.parent
    assert not np.array_equal(read_shard(other), read_shard(train))


def test_a_python_without_documentation_is_refused(cache, library, monkeypatch):
    use_library(monkeypatch, library)
    monkeypatch.setattr(corpus, "topic_documents", lambda: iter(()))
    with pytest.raises(UserError, match=r"has 49 characters of documentation .* at least 200,000"):
        corpus.default_corpus()
    assert files(cache) == {}


def test_a_cache_that_cannot_be_written_is_named(cache):
    cache.mkdir()
    (cache / "corpus").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot make .*corpus.*NUMBAGPT_CACHE"):
        corpus.default_corpus()


def test_a_cache_on_a_full_disk_is_named(small, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as error:
        corpus.default_corpus()
    (folder,) = (small / "corpus").iterdir()
    assert str(error.value) == (
        f"cannot write {folder}/train.bin: No space left on device; make room or name another "
        "folder; NUMBAGPT_CACHE names the cache's folder"
    )
    assert files(small) == {}
