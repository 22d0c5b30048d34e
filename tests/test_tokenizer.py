"""The tokenizer against a naive byte-pair encoder that knows only the ranks file."""

from itertools import pairwise

import numpy as np
import pytest
import regex

from numbagpt import tokenizer
from numbagpt.errors import UserError

# GPT-2's pattern as OpenAI published it, for the engine they used.
PUBLISHED_PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "Hello world",
    "It's they've I'll we'd I'm you're can't 'sup 'Tis",
    "  two  spaces\n\nparagraph\r\n\ttab\n\n\n   \n",
    "12345 6.7e-8 ½ ² Ⅷ ٣",
    "naïve café Straße ĳ ﬁ Å",
    "中文字符 かな 한국어 עברית العربية हिन्दी",
    "👍🏽 👩‍👩‍👧 🏴󠁧󠁢󠁥󠁮󠁧󠁿 \u200b\ufeff\u2028\x85\xa0\x1c|",
    "\x00\x01\x7f\x80",
    "<|endoftext|> is thirteen characters",
    "a" * 300 + " " * 300 + "b",
    "",
    " ",
    "\n\n",
]


@pytest.fixture(scope="module")
def ranks():
    return tokenizer.load_ranks()


def naive_encode(text, ranks):
    """Join, in every word, the pair of lowest rank until none has a rank."""
    ids = []
    for word in PUBLISHED_PATTERN.findall(text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [ranks.get(a + b, np.inf) for a, b in pairwise(parts)]
            if min(pairs, default=np.inf) == np.inf:
                break
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_a_naive_encoder_and_decodes_back(text, ranks):
    ids = tokenizer.encode(text)
    assert ids == naive_encode(text, ranks)
    assert tokenizer.decode(ids) == text


def test_published_example():
    assert tokenizer.encode("Hello world") == [15496, 995]


def test_encode_array_holds_the_ids_as_uint16():
    array = tokenizer.encode_array("Hello world")
    assert array.dtype == np.uint16
    assert array.tolist() == [15496, 995]
    assert tokenizer.encode_array("").shape == (0,)


def test_end_of_text_is_special_only_when_allowed(ranks):
    text = "a<|endoftext|>b"
    assert tokenizer.encode(text) == naive_encode(text, ranks)
    assert tokenizer.END_OF_TEXT not in tokenizer.encode(text)
    assert tokenizer.encode(text, allow_special=True) == [ranks[b"a"], 50256, ranks[b"b"]]
    assert tokenizer.decode([64, 50256, 65]) == text


def test_every_id_stands_for_its_bytes(ranks):
    bytes_of = {rank: token for token, rank in ranks.items()}
    assert sorted(bytes_of) == list(range(50256))
    for i in range(50256):
        assert tokenizer.token_bytes(i) == bytes_of[i]
    assert tokenizer.END_OF_TEXT == 50256
    assert tokenizer.token_bytes(50256) == b"<|endoftext|>"


@pytest.mark.parametrize("bad", [-1, 50257, 50303, 2**31])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(UserError, match=f"token id {bad} .* expected 0 to 50256"):
        tokenizer.decode([15496, bad])
    with pytest.raises(UserError, match=f"token id {bad} "):
        list(tokenizer.decode_stream([bad]))


def test_numpy_ids_decode():
    assert tokenizer.decode(np.array([15496, 995], np.int32)) == "Hello world"


@pytest.mark.parametrize("length", [2**18 - 1, 2**19 - 2, 2**19 + 3, 1_500_000])
@pytest.mark.parametrize("after", ["", "word"])
def test_very_long_white_space(length, after, ranks):
    # The run but its last space is one word of its own: a single id repeated for newlines.
    newline, two = ranks[b"\n"], ranks[b"\n\n"]
    run = length - 1 if after else length
    want = [two] * (run // 2) + [newline] * (run % 2)
    want += [newline, *naive_encode(after, ranks)] if after else []
    assert tokenizer.encode("it" + "\n" * length + after) == [ranks[b"it"], *want]


def test_a_lone_surrogate_becomes_the_replacement_character():
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_stream_holds_back_unfinished_characters(text):
    ids = tokenizer.encode(text)
    pieces = list(tokenizer.decode_stream(ids))
    assert "".join(pieces) == text
    assert all(pieces)
    assert "\ufffd" not in "".join(pieces)


def test_stream_yields_as_tokens_come():
    ids = iter(tokenizer.encode("Hello world 👍"))
    stream = tokenizer.decode_stream(ids)
    assert next(stream) == "Hello"
    assert next(stream) == " world"
    # The thumb's four bytes are several tokens; it comes out whole.
    assert next(stream) == " "
    assert list(stream) == ["👍"]


def test_stream_that_ends_inside_a_character_says_so():
    ids = tokenizer.encode("👍")
    assert len(ids) > 1
    assert "".join(tokenizer.decode_stream(ids[:-1])) == "\ufffd" == tokenizer.decode(ids[:-1])


def test_a_foreign_ranks_file_is_refused(tmp_path):
    path = tmp_path / "ranks"
    path.write_bytes(tokenizer.RANKS_PATH.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"has sha256 [0-9a-f]{64}; expected 306cd27f.*reinstall"):
        tokenizer.load_ranks(path)
    with pytest.raises(UserError, match=r"No such file.*reinstall"):
        tokenizer.load_ranks(tmp_path / "none")
