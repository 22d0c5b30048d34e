"""Flat buffers and the named tensors inside them.

All parameters live in one allocation, all gradients in a second of the same layout, AdamW's two
moments in two more, all activations in a fifth. A named tensor is a view: nothing is ever copied
to be found. One buffer means one memset to clear the gradients, one pass for their norm, and an
address that stays put, which a captured CUDA graph needs.

Every tensor starts on a 256-byte boundary: 128-bit access needs 16, and cuBLASLt picks its fastest
algorithms for well-aligned pointers. The gaps are zero. Names, order and shapes are llm.c's.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from numbagpt.config import GPT2Config

ALIGNMENT = 256

# The parameters that AdamW decays: matrices and embeddings, not biases and layernorm weights.
DECAYED = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")

# The tensors whose first dimension is the layer.
LAYERED = frozenset(
    "ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb "
    "ln1 ln1_mean ln1_rstd atty att attproj residual2 "
    "ln2 ln2_mean ln2_rstd fch fch_gelu fcproj residual3 qkvr".split()
)

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: GPT2Config) -> Shapes:
    """The 16 parameter tensors in order; matrices are (outputs, inputs)."""
    Vp, maxT = config.padded_vocab_size, config.max_seq_len
    L, C = config.num_layers, config.channels
    return {
        "wte": (Vp, C),
        "wpe": (maxT, C),
        "ln1w": (L, C),
        "ln1b": (L, C),
        "qkvw": (L, 3 * C, C),
        "qkvb": (L, 3 * C),
        "attprojw": (L, C, C),
        "attprojb": (L, C),
        "ln2w": (L, C),
        "ln2b": (L, C),
        "fcw": (L, 4 * C, C),
        "fcb": (L, 4 * C),
        "fcprojw": (L, C, 4 * C),
        "fcprojb": (L, C),
        "lnfw": (C,),
        "lnfb": (C,),
    }


def activation_shapes(config: GPT2Config, B: int, T: int, L: int) -> Shapes:
    """The forward pass's tensors for batches of (B, T) with L layers kept.

    Training keeps every layer for the backward pass; inference passes L = 1 and every layer writes
    over the last one's.

    `output` holds the logits (B, T, Vp), later their gradient; before and after it is scratch for
    attention, which needs (B, T, 3C) and (B, NH, T, T). A layer of `att` is (B, NH, T, T) and a
    gap, so that the next one is aligned even where T is odd; it is written in its lower triangle
    only, and its upper triangle must be zeroed once.
    """
    C, NH, Vp = config.channels, config.num_heads, config.padded_vocab_size
    return {
        "encoded": (B, T, C),
        "ln1": (L, B, T, C),
        "ln1_mean": (L, B, T),
        "ln1_rstd": (L, B, T),
        "atty": (L, B, T, C),
        "att": (L, aligned(4 * B * NH * T * T) // 4),
        "attproj": (L, B, T, C),
        "residual2": (L, B, T, C),
        "ln2": (L, B, T, C),
        "ln2_mean": (L, B, T),
        "ln2_rstd": (L, B, T),
        "fch": (L, B, T, 4 * C),
        "fch_gelu": (L, B, T, 4 * C),
        "fcproj": (L, B, T, C),
        "residual3": (L, B, T, C),
        "lnf": (B, T, C),
        "lnf_mean": (B, T),
        "lnf_rstd": (B, T),
        "losses": (B, T),
        "qkvr": (L, 3, B, NH, T, C // NH),
        "output": (B * T * max(3 * C, NH * T, Vp),),
    }


def gradient_shapes(config: GPT2Config, B: int, T: int, scratch: int) -> Shapes:
    """The backward pass's tensors: three gradients that every layer reuses, and partial sums.

    `preatt`, like `att`, is written in its lower triangle only.
    """
    C, NH = config.channels, config.num_heads
    return {
        "bt4c": (B, T, 4 * C),
        "preatt": (B, NH, T, T),
        "residual3": (B, T, C),
        "scratch": (scratch,),
    }


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    return int(np.prod(shape, dtype=np.int64))


def _offsets(shapes: Shapes) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and last byte + 1 of each tensor, every first byte aligned."""
    start = 0
    for name, shape in shapes.items():
        stop = start + 4 * size(shape)
        yield name, start, stop
        start = aligned(stop)


def flat_bytes(shapes: Shapes) -> int:
    """Bytes of the buffer that holds these tensors as float32, gaps included."""
    return sum(aligned(4 * size(shape)) for shape in shapes.values())


class FlatTensors:
    """Named float32 views into one buffer, as attributes: `params.wte`, `acts.lnf`.

    memory   the whole buffer, 1-D float32, gaps included
    shapes   name → shape, in the order they lie
    layers   one namespace a layer with that layer's part of every layered tensor:
             `acts.layers[3].ln1` is `acts.ln1[3]`
    """

    def __init__(self, shapes: Shapes, buffer: object) -> None:
        """buffer: 1-D float32, NumPy or on the device, of at least flat_bytes(shapes) bytes."""
        self.shapes = shapes
        self.memory = buffer[: flat_bytes(shapes) // 4]
        for name, start, stop in _offsets(shapes):
            setattr(self, name, buffer[start // 4 : stop // 4].reshape(shapes[name]))
        layered = [name for name, shape in shapes.items() if len(shape) > 1 and name in LAYERED]
        depth = min((shapes[name][0] for name in layered), default=0)
        self.layers = [
            SimpleNamespace(**{name: self[name][l] for name in layered}) for l in range(depth)
        ]

    def __getitem__(self, name: str) -> object:
        if name not in self.shapes:
            raise KeyError(name)
        return getattr(self, name)
