"""How much memory a model will take, worked out before any of it is asked for."""

from dataclasses import dataclass, replace

import numpy as np

from numbagpt.config import GPT2Config
from numbagpt.ops.flash_attention import flash_attention_scratch
from numbagpt.ops.gelu import gelu_backward_scratch
from numbagpt.ops.layernorm import layernorm_backward_scratch
from numbagpt.ops.matmul import matmul_backward_bias_scratch
from numbagpt.tensors import (
    Layout,
    activation_layout,
    gradient_layout,
    layout_bytes,
    parameter_layout,
)

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """The buffers of a model for batches of up to (B, T) tokens.

    training    with gradients, moments and every layer's activations; else one layer's
    attention   "flash" or "materialized"
    recompute   what the backward pass computes again instead of keeping: 0 nothing, 1 the GELU's
                output, 2 the layernorms' as well
    storage     type of activations and of the matmuls' weights: float32, or uint16 for bf16
    real        type of everything else
    """

    config: GPT2Config
    B: int
    T: int
    training: bool = True
    attention: str = "materialized"
    recompute: int = 0
    storage: type = np.float32
    real: type = np.float32

    def parameters(self) -> Layout:
        """The parameters, their gradients and AdamW's two moments are laid out like this."""
        return parameter_layout(self.config, self.real)

    def weights(self) -> Layout | None:
        """The copy of the parameters in the storage type, where that is not their own."""
        if self.storage == self.real:
            return None
        return parameter_layout(self.config, self.storage)

    def activations(self, b: int, t: int) -> Layout:
        """Activations of batches of (b, t)."""
        return activation_layout(
            self.config,
            b,
            t,
            training=self.training,
            attention=self.attention,
            recompute=self.recompute,
            storage=self.storage,
            real=self.real,
        )

    def gradients(self, b: int, t: int) -> Layout:
        """Gradients of activations, for batches of (b, t)."""
        return gradient_layout(
            self.config,
            b,
            t,
            attention=self.attention,
            scratch=self._scratch(),
            storage=self.storage,
            real=self.real,
        )

    def _scratch(self) -> int:
        """Elements of partial sums that the largest reduction needs."""
        C, N = self.config.channels, self.B * self.T
        flash = flash_attention_scratch(self.B, self.T, C, self.config.num_heads)
        return max(
            layernorm_backward_scratch(N, C),
            flash if self.attention == "flash" else 0,
            gelu_backward_scratch(N, 4 * C),
            matmul_backward_bias_scratch(N, 3 * C),
        )

    @property
    def buffers(self) -> dict[str, int]:
        """Name of each buffer → its bytes, in the order they are allocated."""
        parameters = layout_bytes(self.parameters(), dense=True)
        sizes = {"parameters": parameters}
        if weights := self.weights():
            sizes["bf16 weights"] = layout_bytes(weights, dense=True)
        sizes["activations"] = layout_bytes(self.activations(self.B, self.T), dense=False)
        if self.training:
            sizes["parameter gradients"] = parameters
            sizes["AdamW moments m, v"] = 2 * parameters
            gradients = self.gradients(self.B, self.T)
            sizes["activation gradients"] = layout_bytes(gradients, dense=False)
        return sizes

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return sum(self.buffers.values())

    def __str__(self) -> str:
        rows = self.buffers | {"total": self.total}
        width = max(map(len, rows))
        lines = [f"  {name:{width}}  {nbytes / MIB:10,.1f} MiB" for name, nbytes in rows.items()]
        return f"memory for B={self.B}, T={self.T}:\n" + "\n".join(lines)

    def largest_batch(self, free: int) -> int:
        """Largest B whose plan fits into `free` bytes; 0 if none does."""
        fits, too_large = 0, self.B
        while too_large - fits > 1:
            B = (fits + too_large) // 2
            if replace(self, B=B).total <= free:
                fits = B
            else:
                too_large = B
        return fits


def num_parameters(config: GPT2Config) -> int:
    """Parameters of the model, the padded vocabulary's rows not counted."""
    padding = (config.padded_vocab_size - config.vocab_size) * config.channels
    layout = parameter_layout(config)
    return sum((spec.layers or 1) * spec.size for spec in layout.values()) - padding
