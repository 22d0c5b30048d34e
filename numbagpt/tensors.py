"""Flat buffers and the named tensors inside them.

All parameters live in one allocation, all gradients in a second of the same layout, AdamW's two
moments in two more, all activations in a fifth. A named tensor is a view: nothing is ever copied
to be found. One buffer means one pass for the gradients' norm, and addresses that stay put, which
a captured CUDA graph needs.

Every tensor starts on a 256-byte boundary: 128-bit access needs 16, and cuBLASLt picks its fastest
algorithms for well-aligned pointers. Names, order and shapes are llm.c's.

Two types appear. `real` is float32 (float64 in tests): parameters, gradients, moments, statistics,
losses. `storage` is what activations and the matmuls' copy of the weights are kept in: real, or
uint16 holding bf16 bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from numbagpt.config import GPT2Config

ALIGNMENT = 256

# The parameters that AdamW decays: matrices and embeddings, not biases and layernorm weights.
DECAYED = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")

# Rows of logits that are in memory at a time: the head and its backward run in chunks of rows, or
# the logits of a large batch would take more memory than all layers together.
LOGITS_ROWS = 16384


@dataclass(frozen=True)
class Spec:
    """What a tensor is: its shape, of one layer where it has layers, and its element type."""

    shape: tuple[int, ...]
    dtype: np.dtype
    layers: int | None = None

    @property
    def size(self) -> int:
        """Number of elements of one layer."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one layer."""
        return self.size * self.dtype.itemsize


Layout = dict[str, Spec]


def parameter_layout(config: GPT2Config, dtype: type = np.float32) -> Layout:
    """The 16 parameter tensors in order; matrices are (outputs, inputs)."""
    Vp, maxT = config.padded_vocab_size, config.max_seq_len
    L, C = config.num_layers, config.channels
    per_layer = {
        "ln1w": (C,),
        "ln1b": (C,),
        "qkvw": (3 * C, C),
        "qkvb": (3 * C,),
        "attprojw": (C, C),
        "attprojb": (C,),
        "ln2w": (C,),
        "ln2b": (C,),
        "fcw": (4 * C, C),
        "fcb": (4 * C,),
        "fcprojw": (C, 4 * C),
        "fcprojb": (C,),
    }
    dtype = np.dtype(dtype)
    return {
        "wte": Spec((Vp, C), dtype),
        "wpe": Spec((maxT, C), dtype),
        **{name: Spec(shape, dtype, L) for name, shape in per_layer.items()},
        "lnfw": Spec((C,), dtype),
        "lnfb": Spec((C,), dtype),
    }


def parameter_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Name → whole shape of the 16 parameter tensors, in order: what checkpoints hold."""
    return {
        name: spec.shape if spec.layers is None else (spec.layers, *spec.shape)
        for name, spec in parameter_layout(config).items()
    }


def activation_layout(
    config: GPT2Config,
    B: int,
    T: int,
    *,
    training: bool,
    attention: str,
    recompute: int,
    storage: type,
    real: type,
) -> Layout:
    """The forward pass's tensors for batches of (B, T).

    Training keeps every layer's activations for the backward pass; inference lets every layer
    write over the last one's. So does training with what the backward pass computes again: from
    recompute = 1 on fch_gelu, from 2 on ln1 and ln2 as well.

    attention   "flash": qkvr holds the packed (B, T, 3, NH, HS), and lse the softmax's
                log-sum-exp; "materialized": qkvr is (3, B, NH, T, HS), and att holds the softmax,
                its lower triangle only: the upper must be zeroed once
    output      logits of up to LOGITS_ROWS positions, later their gradient; before and after it is
                scratch for materialized attention, which needs (B, T, 3C) and (B, NH, T, T), and
                for transposes of (B, T, C)
    """
    C, NH, Vp, L = config.channels, config.num_heads, config.padded_vocab_size, config.num_layers
    storage, real = np.dtype(storage), np.dtype(real)
    kept = L if training else 1
    kept_gelu = kept if recompute < 1 else 1
    kept_ln = kept if recompute < 2 else 1
    btc = B, T, C
    output = max(min(B * T, LOGITS_ROWS) * Vp, B * T * C)
    if attention == "flash":
        specific = {
            "qkvr": Spec((B, T, 3 * C), storage, kept),
            "lse": Spec((B, NH, T), real, kept),
        }
    else:
        output = max(output, B * T * 3 * C, B * NH * T * T)
        specific = {
            "qkvr": Spec((3, B, NH, T, config.head_size), storage, kept),
            "att": Spec((B, NH, T, T), storage, kept),
        }
    return {
        "encoded": Spec(btc, storage),
        "ln1": Spec(btc, storage, kept_ln),
        "ln1_mean": Spec((B, T), real, kept),
        "ln1_rstd": Spec((B, T), real, kept),
        **specific,
        "atty": Spec(btc, storage, kept),
        "residual2": Spec(btc, storage, kept),
        "ln2": Spec(btc, storage, kept_ln),
        "ln2_mean": Spec((B, T), real, kept),
        "ln2_rstd": Spec((B, T), real, kept),
        "fch": Spec((B, T, 4 * C), storage, kept),
        "fch_gelu": Spec((B, T, 4 * C), storage, kept_gelu),
        "residual3": Spec(btc, storage, kept),
        "lnf": Spec(btc, storage),
        "lnf_mean": Spec((B, T), real),
        "lnf_rstd": Spec((B, T), real),
        "losses": Spec((B, T), real),
        "output": Spec((output,), storage),
    }


def gradient_layout(
    config: GPT2Config, B: int, T: int, *, attention: str, scratch: int, storage: type, real: type
) -> Layout:
    """The backward pass's tensors: gradients that every layer reuses, and partial sums.

    `preatt`, like `att`, is written in its lower triangle only.
    """
    C, NH = config.channels, config.num_heads
    storage = np.dtype(storage)
    square = {"preatt": Spec((B, NH, T, T), storage)} if attention == "materialized" else {}
    return {
        "bt4c": Spec((B, T, 4 * C), storage),
        **square,
        "residual3": Spec((B, T, C), storage),
        "scratch": Spec((scratch,), np.dtype(real)),
    }


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _stride(spec: Spec, dense: bool) -> int:
    """Bytes from one layer to the next."""
    return spec.nbytes if dense else aligned(spec.nbytes)


def layout_bytes(layout: Layout, dense: bool) -> int:
    """Bytes of the buffer that holds these tensors, gaps included."""
    return sum(aligned((spec.layers or 1) * _stride(spec, dense)) for spec in layout.values())


class FlatTensors:
    """Named views into one buffer, as attributes: `params.wte`, `acts.lnf`.

    memory   the whole buffer, 1-D bytes, gaps included; the gaps are zero
    layers   one namespace a layer, with every layered tensor's part: `acts.layers[3].ln1`. A
             tensor of which one layer is kept is the same view in all of them.

    Parameters are dense: the layers of a tensor follow each other without gaps, so that the whole
    tensor is a view too, `params.qkvw` (L, 3C, C). Each layer of an activation is aligned instead,
    or one with an odd number of elements would push the next one off the grid of 128-bit access.
    """

    def __init__(
        self, layout: Layout, buffer: object, num_layers: int, dense: bool = False
    ) -> None:
        """buffer: 1-D uint8, NumPy or on the device, of at least layout_bytes(layout) bytes."""
        self.layout = layout
        self.memory = buffer[: layout_bytes(layout, dense)]
        self.layers = [SimpleNamespace() for _ in range(num_layers)]
        self._spans: dict[str, tuple[int, int]] = {}
        start = 0
        for name, spec in layout.items():
            stride = _stride(spec, dense)
            count = spec.layers or 1
            views = [self._view(start + i * stride, spec.shape, spec) for i in range(count)]
            if spec.layers is None:
                setattr(self, name, views[0])
            else:
                for l, layer in enumerate(self.layers):
                    setattr(layer, name, views[l % count])
                if dense:
                    setattr(self, name, self._view(start, (count, *spec.shape), spec))
            end = start + aligned(count * stride)
            self._spans[name] = start, end
            start = end

    def runs(self, names: Iterable[str]) -> list:
        """The parts of memory that these tensors take, neighbours in one; in memory's order."""
        parts: list[tuple[int, int]] = []
        for start, end in sorted(self._spans[name] for name in names):
            if parts and parts[-1][1] == start:
                start, _ = parts.pop()
            parts.append((start, end))
        return [self.memory[start:end] for start, end in parts]

    def _view(self, start: int, shape: tuple[int, ...], spec: Spec) -> object:
        nbytes = int(np.prod(shape, dtype=np.int64)) * spec.dtype.itemsize
        return self.memory[start : start + nbytes].view(spec.dtype).reshape(shape)

    def __getitem__(self, name: str) -> object:
        """A tensor by its name, whole."""
        if name not in self.layout:
            raise KeyError(name)
        return getattr(self, name)
