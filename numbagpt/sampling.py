"""Choosing the next token: temperature, top-k, top-p, and the loop that writes a text.

    p  = softmax(logits / temperature)
    top_k   keeps the tokens whose logit is at least the k-th largest
    top_p   of those, keeps the smallest set of the most probable whose probabilities reach top_p

in this order, each step renormalising what is left, as Hugging Face's `generate` does. Temperature
below 1 sharpens the distribution, above 1 flattens it; 0 is its limit: the most probable token.
Nucleus sampling (top-p) is Holtzman et al., 2019 (arXiv:1904.09751).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from numbagpt import tokenizer
from numbagpt.errors import NotFinite, UserError

if TYPE_CHECKING:
    from numbagpt.gpt2 import GPT2


def token_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> np.ndarray:
    """The distribution (V,) in float64 that the next token is drawn from.

    logits (V,)   of the real vocabulary, without the padding, of any float dtype
    temperature   0 or more
    top_k         at least 1; None keeps all
    top_p         above 0, at most 1, which keeps all

    Raises NotFinite, a UserError, if a logit is not finite.
    """
    logits = np.asarray(logits, np.float64)
    if not np.isfinite(logits).all():
        raise NotFinite(
            "the model gives logits that are not finite: its weights are damaged; take others"
        )
    if temperature == 0:
        probabilities = np.zeros_like(logits)
        probabilities[logits.argmax()] = 1
        return probabilities
    # The largest logit is subtracted first: dividing by a tiny temperature cannot then overflow
    # upwards, and what underflows to -inf has probability 0.
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()) / temperature
    if top_k is not None and top_k < scores.size:
        kth_largest = np.partition(scores, -top_k)[-top_k]
        scores = np.where(scores >= kth_largest, scores, -np.inf)
    probabilities = np.exp(scores)
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        reached = np.searchsorted(np.cumsum(probabilities[order]), top_p)
        probabilities[order[reached + 1 :]] = 0
        probabilities /= probabilities.sum()
    return probabilities


def sample_token(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None,
    top_p: float,
    rng: np.random.Generator,
) -> int:
    """Draw the next token from `token_probabilities` by inverting its cumulative sum.

    Takes one number from rng, at temperature 0 too: what follows in the stream does not depend on
    the temperature.
    """
    cumulative = np.cumsum(token_probabilities(logits, temperature, top_k, top_p))
    cumulative /= cumulative[-1]
    # "right" steps over tokens of probability 0, whose cumulative sum equals their predecessor's.
    return int(np.searchsorted(cumulative, rng.random(), side="right"))


def generate(
    next_token_logits: Callable[[list[int]], np.ndarray],
    tokens: list[int],
    max_new_tokens: int,
    context: int,
    *,
    end: int | None,
    rng: np.random.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Yield up to max_new_tokens tokens that continue `tokens`, each as soon as it is drawn.

    next_token_logits   maps a list of tokens to the logits (V,) of the one that follows
    tokens              the prompt, at least one token; only the last `context` are looked at
    context             longest input the model takes
    end                 the token that ends a text; it is not yielded
    """
    tokens = list(tokens)
    for _ in range(max_new_tokens):
        logits = next_token_logits(tokens[-context:])
        token = sample_token(logits, temperature, top_k, top_p, rng)
        if token == end:
            return
        tokens.append(token)
        yield token


def stream_text(
    model: "GPT2",
    prompt: list[int],
    max_new_tokens: int,
    rng: np.random.Generator,
    **settings: float | None,
) -> Iterator[str]:
    """Yield the text with which a model continues a prompt, piece by piece, up to its end of text.

    prompt     tokens; none stands for the beginning of a text
    settings   temperature, top_k, top_p

    Raises UserError if the model's vocabulary is not GPT-2's. (A larger one is padded.)
    """
    if model.config.vocab_size < tokenizer.VOCAB_SIZE:
        raise UserError(
            f"the model knows {model.config.vocab_size} tokens; text needs GPT-2's vocabulary of "
            f"{tokenizer.VOCAB_SIZE}"
        )

    def next_token_logits(tokens: list[int]) -> np.ndarray:
        # NumPy need not warn: token_probabilities refuses what is not finite, in one line.
        with np.errstate(all="ignore"):
            return model.next_token_logits(tokens)[: tokenizer.VOCAB_SIZE]

    tokens = generate(
        next_token_logits,
        prompt or [tokenizer.END_OF_TEXT],
        max_new_tokens,
        model.T,
        end=tokenizer.END_OF_TEXT,
        rng=rng,
        **settings,
    )
    return tokenizer.decode_stream(tokens)
