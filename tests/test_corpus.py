"""The default corpus: what it takes from a library, what it leaves out, and how it is kept."""

import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from numbagpt import corpus
from numbagpt.errors import UserError
from numbagpt.shards import read_shard
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


def test_prose_leaves_out_what_is_not_prose():
    text = (
        "A title\n*******\n\nA paragraph,  \n\tindented.\n\n>>> 1 + 1\n2\n\n"
        "   rule ::= other\n\n-----\n\n\nThe end."
    )
    assert corpus.prose(text, set()) == "A title\n\nA paragraph,\n        indented.\n\nThe end."


def test_prose_leaves_out_what_was_seen():
    seen = {"Old."}
    assert corpus.prose("New.\n\nOld.\n\nNew.\n\nNewer.", seen) == "New.\n\nNewer."
    assert seen == {"Old.", "New.", "Newer."}
    assert corpus.prose("New.\n\nOld.", seen) == ""


def test_corpus_is_english_in_two_parts_that_share_no_paragraph(cache, capsys):
    train, val = (read_shard(path) for path in corpus.default_corpus())
    assert capsys.readouterr().out.count("\n") == 1
    assert train[0] == val[0] == END_OF_TEXT
    assert max(train.max(), val.max()) == END_OF_TEXT
    assert len(train) > 50_000
    assert len(val) > 4096
    documents = [decode(part).split("<|endoftext|>")[1:] for part in (train, val)]
    # One in ten, from the first on.
    assert len(documents[1]) == -(-(len(documents[0]) + len(documents[1])) // 10)
    assert all(text.strip() for part in documents for text in part)
    paragraphs = [{p for text in part for p in text.split("\n\n")} for part in documents]
    assert not paragraphs[0] & paragraphs[1]
    everything = paragraphs[0] | paragraphs[1]
    assert not any(">>>" in paragraph for paragraph in everything)
    # A sentence of the language reference and a docstring of the email package.
    assert any(
        'The "with" statement is used to wrap the execution of a block with' in paragraph
        for paragraph in everything
    )
    assert any(paragraph == "Basic message object." for paragraph in everything)


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
    with pytest.raises(
        UserError, match=r"has 1\d\d characters of documentation .* at least 200,000"
    ):
        corpus.default_corpus()
    assert files(cache) == {}


def test_a_cache_that_cannot_be_written_is_named(cache):
    cache.mkdir()
    (cache / "corpus").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot make .*corpus.*NUMBAGPT_CACHE"):
        corpus.default_corpus()
