"""GPT-2's byte-pair encoding: text to token ids and back, through tiktoken, with no download.

The vocabulary is numbagpt/gpt2.tiktoken: 50256 lines of "base64(bytes) rank", OpenAI's GPT-2
merges (MIT licence, https://github.com/openai/gpt-2) in tiktoken's ranks format,
sha256 306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930. The hash is checked when
the file is loaded.

Encoding has two steps. A regular expression cuts the text into words, each with the space before
it; inside a word, the adjacent pair of byte strings with the lowest rank is joined until no pair
has a rank. Id 50256, <|endoftext|>, comes from no bytes: it stands before every document.
"""

import base64
import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from numbagpt.config import VOCAB_SIZE
from numbagpt.errors import UserError

END_OF_TEXT = VOCAB_SIZE - 1

RANKS_PATH = Path(__file__).with_name("gpt2.tiktoken")
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

# Words of GPT-2: contractions, then letters, digits or other symbols with at most one space in
# front, then white space. The last space before a word belongs to the word, hence (?!\S). The
# possessive ++ finds the same words as + and keeps no list of places to back up to.
SPLIT_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# \s+(?!\S) does keep such a list, and the expression engine gives up at a million entries.
_LONG = 2**18
_SPACES = re.compile("[\\t-\\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")

# Half of a UTF-16 pair on its own, which JSON can spell (\ud800) and UTF-8 cannot.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def load_ranks(path: Path = RANKS_PATH) -> dict[bytes, int]:
    """Read a tiktoken ranks file: {token bytes: id}, 50256 of them.

    Raises UserError if the file cannot be read or is not GPT-2's.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; reinstall numbagpt") from error
    found = hashlib.sha256(data).hexdigest()
    if found != RANKS_SHA256:
        raise UserError(f"{path} has sha256 {found}; expected {RANKS_SHA256}; reinstall numbagpt")
    lines = (line.split() for line in data.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@cache
def _encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=load_ranks(),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def encode_array(text: str, allow_special: bool = False) -> np.ndarray:
    """Token ids of a text, (n,) uint16. Releases the GIL while it works.

    allow_special   read "<|endoftext|>" in the text as id 50256, not as thirteen characters

    A lone surrogate has no UTF-8 form and is read as U+FFFD.
    """
    special = {"<|endoftext|>"} if allow_special else set()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = _LONE_SURROGATE.sub("\ufffd", text)
    parts = [
        _encoding().encode_to_numpy(part, allowed_special=special, disallowed_special=())
        for part in _apart_from_long_spaces(text)
    ]
    return np.concatenate(parts).astype(np.uint16)


def _apart_from_long_spaces(text: str) -> list[str]:
    """Cut a text before and after its very long runs of white space; the words stay the same.

    A word always ends where white space begins. The last space of a run belongs to what follows.
    """
    # A run of 2 _LONG holds one whole block; a shorter one is no trouble.
    if not any(text[i : i + _LONG].isspace() for i in range(0, len(text), _LONG)):
        return [text]
    runs = (run.span() for run in _SPACES.finditer(text))
    cuts = [cut for a, b in runs if b - a >= _LONG for cut in (a, b if b == len(text) else b - 1)]
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def encode(text: str, allow_special: bool = False) -> list[int]:
    """Token ids of a text as a list; see encode_array."""
    return encode_array(text, allow_special).tolist()


def token_bytes(token: int) -> bytes:
    """The bytes one id stands for. Raises UserError for an id outside 0 … 50256."""
    if not 0 <= token < VOCAB_SIZE:
        raise UserError(
            f"token id {token} is not in GPT-2's vocabulary; expected 0 to {VOCAB_SIZE - 1}"
        )
    return _encoding().decode_single_token_bytes(int(token))


def decode(tokens: Iterable[int]) -> str:
    """Text of token ids; bytes that are not UTF-8 become U+FFFD.

    Raises UserError for an id outside 0 … 50256.
    """
    return b"".join(map(token_bytes, tokens)).decode("utf-8", errors="replace")


def decode_stream(tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they come; the pieces joined are decode(tokens).

    A character may be spread over several tokens: its bytes are held back until the last of them
    is there. Pieces are never empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if piece := decoder.decode(token_bytes(token)):
            yield piece
    if piece := decoder.decode(b"", final=True):
        yield piece
