"""tinyshakespeare, the data set fetched by name: 1.1 MB of Shakespeare's plays.

From the char-rnn repository, https://github.com/karpathy/char-rnn. Tokens are those of llm.c's
dev/data/tinyshakespeare.py, so that losses can be compared: every speech is a document (the text is
cut at blank lines), begins with <|endoftext|> and keeps its blank line; the first 32,768 of the
338,028 tokens are for validation.
"""

import hashlib
import http.client
import urllib.request

import numpy as np

from numbagpt import cache
from numbagpt.errors import UserError
from numbagpt.files import atomic_write, exists, read_bytes
from numbagpt.tokenizer import END_OF_TEXT, encode_array

NAME = "tinyshakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NUM_BYTES = 1_115_394
VAL_TOKENS = 32_768
TIMEOUT_SECONDS = 20


def load_text() -> str:
    """The text, from the cache or else from the network; what was fetched is cached.

    Raises UserError if it can be had from neither, is not the text we know, or the cache cannot be
    read or written.
    """
    path = cache.cache_dir() / f"{NAME}.txt"
    expected = f"{NUM_BYTES:,} bytes with sha256 {SHA256}"
    by_hand = f"download it by hand, save it as {path} and run this again"
    if exists(path):
        if _is_it(data := read_bytes(path)):
            return data.decode()
        by_hand = (
            f"nor is {path} that text: it has {len(data):,} bytes; expected {expected}; {by_hand}"
        )
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_SECONDS) as response:
            data = response.read(NUM_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"cannot download {URL} ({reason}); {by_hand}") from error
    if not _is_it(data):
        raise UserError(f"{URL} did not give the {expected}; {by_hand}")
    with cache.writing(), atomic_write(path) as file:
        file.write(data)
    return data.decode()


def tokenize(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The train and validation tokens, both uint16."""
    *speeches, last = text.split("\n\n")
    parts = [encode_array(speech) for speech in (*(s + "\n\n" for s in speeches), last)]
    tokens = np.concatenate([np.append(np.uint16(END_OF_TEXT), part) for part in parts])
    return tokens[VAL_TOKENS:], tokens[:VAL_TOKENS]


def _is_it(data: bytes) -> bool:
    return hashlib.sha256(data).hexdigest() == SHA256
