"""What a matrix product is to cuBLASLt: the kind of it that has a plan of its own."""

from typing import NamedTuple

# bias and gelu_aux are moved in vectors: the smallest alignment, in bytes, that they may have.
VECTOR_BYTES = 16


class BlasError(RuntimeError):
    """cuBLASLt refused or failed; the message names the shapes, types and transposes."""


class Problem(NamedTuple):
    """Everything that cuBLASLt's choice of an algorithm depends on: the key of a plan."""

    batch: int
    M: int
    N: int
    K: int
    transpose_a: bool
    transpose_b: bool
    storage: str  # of a and b: float32 or bfloat16
    out_storage: str  # of out, bias, add and gelu_aux
    has_bias: bool
    has_gelu: bool
    accumulates: bool  # beta is not 0: cuBLASLt's C is out
    adds: bool  # C is another array, add
    precision: str  # fp32, tf32 or bf16
    alignments: tuple[int, ...]  # of out, a, b and, if there is one, add or gelu_aux; in bytes

    @property
    def out_bytes(self) -> int:
        """Size of out."""
        return self.batch * self.M * self.N * (2 if self.out_storage == "bfloat16" else 4)

    def __str__(self) -> str:
        """The product in words: names the plan in messages and in the file of choices."""
        a = f"a{'^T' * self.transpose_a} ({self.M}, {self.K}) {self.storage}"
        b = f"b{'^T' * self.transpose_b} ({self.K}, {self.N}) {self.storage}"
        value = f"{a} @ {b}{' + out' * self.accumulates}{' + bias' * self.has_bias}"
        value += " + add" * self.adds
        if self.has_gelu:
            value = f"gelu(aux = {value})"
        names = ("out", "a", "b", "add" if self.adds else "aux")[: len(self.alignments)]
        return (
            f"out ({self.M}, {self.N}) {self.out_storage} = {value}"
            f"{f', batch of {self.batch}' * (self.batch > 1)}, {self.precision}, "
            f"{', '.join(names)} aligned to {', '.join(map(str, self.alignments))} bytes"
        )
