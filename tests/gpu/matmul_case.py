"""One matrix product: random arrays, and what float64 makes of them."""

import numpy as np

from numbagpt.gpu import blas
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16

TYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16}


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def values(array: np.ndarray) -> np.ndarray:
    """What an array stands for: bfloat16 lives in uint16."""
    return bf16_to_float32(array) if array.dtype == np.uint16 else array


def poison(array: np.ndarray) -> None:
    array[...] = 0x7FC0 if array.dtype == np.uint16 else np.nan


def error(result: np.ndarray, expected: np.ndarray) -> float:
    """Relative, in the 2-norm."""
    difference = np.asarray(values(result), np.float64) - expected
    return np.linalg.norm(difference) / np.linalg.norm(expected)


class Case:
    """Arrays of one product, and the float64 result of what they store.

    shape     batch (0: no batch dimension), M, N, K
    options   alpha and beta of matmul; bias=True; add=True; gelu=True
    """

    def __init__(
        self,
        shape,
        transposes=(False, False),
        options=None,
        storage="float32",
        out_storage=None,
    ) -> None:
        batch, M, N, K = shape
        lead = (batch,) if batch else ()
        self.options = dict(options or {})
        rng = np.random.default_rng([M, N, K, batch])

        def normal(storage, *dimensions, scale=1.0):
            array = (scale * rng.standard_normal(dimensions)).astype(np.float32)
            if storage == "bfloat16":
                return float32_to_bf16(array)
            return array.astype(TYPES[storage])

        ta, tb = self.transposes = transposes
        out_storage = out_storage or storage
        with_gelu = self.options.pop("gelu", False)
        # sums of K terms stay where GELU bends
        scale = 1 / np.sqrt(K) if with_gelu else 1.0
        self.a = normal(storage, *lead, *((K, M) if ta else (M, K)), scale=scale)
        self.b = normal(storage, *lead, *((N, K) if tb else (K, N)))
        self.out = normal(out_storage, *lead, M, N)
        self.arrays = {}
        a, b = (values(x).astype(np.float64) for x in (self.a, self.b))
        product = np.einsum(
            f"...{'km' if ta else 'mk'},...{'nk' if tb else 'kn'}->...mn", a, b, optimize=True
        )
        beta = self.options.get("beta", 0.0)
        self.expected = self.options.get("alpha", 1.0) * product + beta * values(self.out)
        if self.options.pop("bias", False):
            self.arrays["bias"] = bias = normal(out_storage, N)
            self.expected += values(bias)
        if self.options.pop("add", False):
            self.arrays["add"] = add = normal(out_storage, *lead, M, N)
            self.expected += values(add)
        self.expected_aux = None
        if with_gelu:
            self.arrays["gelu_aux"] = np.empty_like(self.out)
            poison(self.arrays["gelu_aux"])
            self.expected_aux = self.expected
            self.expected = gelu(self.expected)
        if beta == 0.0:
            poison(self.out)  # must not be read

    def on(self, to_device):
        """A function that runs matmul on the arrays as `to_device` makes them, and those arrays."""
        arrays = [to_device(x) for x in (self.out, self.a, self.b)]
        keywords = {name: to_device(x) for name, x in self.arrays.items()}
        ta, tb = self.transposes

        def run():
            blas.matmul(*arrays, transpose_a=ta, transpose_b=tb, **keywords, **self.options)

        return run, arrays[0], keywords

    def run(self, to_device=lambda array: array, to_host=lambda array: array) -> np.ndarray:
        """Call matmul; returns out."""
        run, out, keywords = self.on(to_device)
        run()
        if self.expected_aux is not None:
            self.aux = to_host(keywords["gelu_aux"])
        return to_host(out)

    def error(self, result) -> float:
        """Relative error of out and, where it is written, of gelu_aux: the larger one, or NaN."""
        errors = [error(result, self.expected)]
        if self.expected_aux is not None:
            errors.append(error(self.aux, self.expected_aux))
        return float(np.max(errors))  # Python's max may pass over a NaN
