"""How much memory a model will take, worked out before any of it is asked for."""

from dataclasses import dataclass

from numbagpt.config import GPT2Config
from numbagpt.ops.layernorm import layernorm_backward_scratch
from numbagpt.ops.matmul import matmul_backward_bias_scratch
from numbagpt.tensors import (
    Shapes,
    activation_shapes,
    flat_bytes,
    gradient_shapes,
    parameter_shapes,
    size,
)

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """The buffers of a model and their bytes, in the order they are allocated."""

    config: GPT2Config
    B: int
    T: int
    training: bool
    parameters: Shapes
    activations: Shapes
    gradients: Shapes

    @property
    def buffers(self) -> dict[str, int]:
        """Name of each flat buffer → its bytes."""
        parameters = flat_bytes(self.parameters)
        sizes = {"parameters": parameters, "activations": flat_bytes(self.activations)}
        if self.training:
            sizes["parameter gradients"] = parameters
            sizes["AdamW moments m, v"] = 2 * parameters
            sizes["activation gradients"] = flat_bytes(self.gradients)
        return sizes

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return sum(self.buffers.values())

    def __str__(self) -> str:
        width = max(map(len, self.buffers))
        lines = [
            f"  {name:{width}}  {bytes_ / MIB:10,.1f} MiB" for name, bytes_ in self.buffers.items()
        ]
        lines.append(f"  {'total':{width}}  {self.total / MIB:10,.1f} MiB")
        return f"memory for B={self.B}, T={self.T}:\n" + "\n".join(lines)

    def largest_batch(self, free: int) -> int:
        """Largest B whose plan fits into `free` bytes; 0 if none does."""
        fits, too_large = 0, self.B
        while too_large - fits > 1:
            B = (fits + too_large) // 2
            if memory_plan(self.config, B, self.T, self.training).total <= free:
                fits = B
            else:
                too_large = B
        return fits


def memory_plan(config: GPT2Config, B: int, T: int, training: bool = True) -> MemoryPlan:
    """Plan a model for batches of up to (B, T) tokens; inference keeps one layer's activations."""
    return MemoryPlan(
        config,
        B,
        T,
        training,
        parameter_shapes(config),
        activation_shapes(config, B, T, config.num_layers if training else 1),
        gradient_shapes(config, B, T, _scratch(config, B * T)),
    )


def _scratch(config: GPT2Config, N: int) -> int:
    """float32 elements of partial sums that the largest reduction over N rows needs."""
    C = config.channels
    return max(
        layernorm_backward_scratch(N, C),
        *(matmul_backward_bias_scratch(N, OC) for OC in (C, 3 * C, 4 * C)),
    )


def num_parameters(config: GPT2Config) -> int:
    """Parameters of the model, the padded vocabulary's rows not counted."""
    padding = (config.padded_vocab_size - config.vocab_size) * config.channels
    return sum(map(size, parameter_shapes(config).values())) - padding
