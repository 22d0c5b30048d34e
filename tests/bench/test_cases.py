"""The benchmarks' bytes and FLOPs against the arrays that the operations are called with."""

from collections import Counter

import numpy as np
import pytest

from numbagpt.bench import cases as module
from numbagpt.config import PRESETS
from numbagpt.ops import attention, matmul

CONFIG, B, T = PRESETS["d12"], 4, 1024

# Reads and writes of each argument that is an array: 1 for an input that is read or an output that
# is written, 2 for what is both, 1/2 for half of a matrix, 0 for scratch; `rows` where only those
# of the batch's tokens are touched.
PASSES = {
    "encoder_forward": "1 1 rows 1",
    "encoder_backward": "2rows 2 2 1 1 1",
    "layernorm_forward": "1 1 1 1 1 1",
    "layernorm_backward": "2 2 2 1 1 1 1 1 0 2",
    "residual_forward": "1 1 1",
    "gelu_forward": "1 1",
    "gelu_backward": "1 2 1 1 0",
    "matmul_backward_bias": "2 1 0",
    "flash_attention_forward": "1 1 1",
    "flash_attention_backward": "1 1 1 1 1 0 2",
    "fused_classifier": "2 1 - - 1",
    "adamw_update": "2 1 2 2 1 1 - - - - 1",
    "global_norm": "1 1 1 0",
    "matmul_forward": "1 1 1 1",
    "matmul_gelu_forward": "1 1 1 1 1",
    "matmul": "1 1 1",
    "transpose": "1 1",
    "permute": "1 1",
    "permute_backward": "1 1",
    "unpermute": "1 1",
    "unpermute_backward": "1 1",
    "softmax_forward": "0.5 0.5",
    "softmax_backward": "0.5 0.5 0.5",
}
# Two flash products of half a matrix each, five backward; 2 FLOPs for each of T T HS.
HEADS = B * CONFIG.num_heads * T * T * CONFIG.head_size
FLASH_FLOPS = {"flash_attention_forward": 2 * HEADS, "flash_attention_backward": 5 * HEADS}


class HostArrays(module.Arrays):
    """Arrays of the same shapes and types that no byte is ever written to."""

    def _random(self, shape, dtype):
        return np.empty(shape, dtype)

    def copy(self, array):
        return array


class Recorder:
    """Stands for every operation, and counts the bytes and FLOPs of its calls."""

    def __init__(self) -> None:
        self.counts = Counter()

    def operation(self, name):
        return lambda *arguments, **keywords: self.record(name, arguments, **keywords)

    def record(self, name, arguments, transpose_a=False, transpose_b=False, beta=0.0, **_):
        passes = PASSES[name].split()
        for array, times in zip(arguments, passes, strict=False):
            if times.endswith("rows"):
                (tokens,) = (a for a in arguments if a.shape == (B, T))
                times = float(times.removesuffix("rows") or 1) * np.unique(tokens).size / len(array)
            if isinstance(array, np.ndarray):
                self.counts["bytes"] += float(times) * array.nbytes
        if name == "matmul" and beta:
            self.counts["bytes"] += arguments[0].nbytes
        if "matmul" in name and "bias" not in name:
            out, a = (arguments[i] for i in ((0, 2) if "gelu" in name else (0, 1)))
            K = a.shape[-2] if transpose_a else a.shape[-1]
            self.counts["flops"] += 2 * out.size * K
        self.counts["flops"] += FLASH_FLOPS.get(name, 0)


@pytest.fixture
def recorder(monkeypatch):
    """Every operation of the cases, and what materialized attention consists of, is recorded."""
    recorder = Recorder()
    for name in PASSES:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, recorder.operation(name))
    parts = attention.Operations(*map(recorder.operation, attention.Operations._fields))
    monkeypatch.setattr(attention, "KERNELS", parts)
    monkeypatch.setattr(module.blas, "matmul", recorder.operation("matmul"))
    monkeypatch.setattr(module, "Arrays", HostArrays)
    return recorder


@pytest.mark.parametrize(
    ("storage", "transposes"),
    [(np.float32, False), (np.float32, True), (np.uint16, False)],
    ids=["float32", "float32, transposes", "bf16"],
)
def test_bytes_and_flops(recorder, monkeypatch, storage, transposes):
    # of the weights' gradients, the product alone is counted
    monkeypatch.setattr(matmul, "transpose", lambda out, inp: None)
    names = []
    for case in module.cases(CONFIG, B, T, storage, transposes):
        names.append(case.name)
        recorder.counts.clear()
        case.make_call()()
        moved = recorder.counts["bytes"]
        # Left out are numbers of which there is one for a row or a column.
        assert 0.99 * moved <= case.nbytes <= moved, case.name
        assert case.flops == recorder.counts["flops"], case.name
    assert len(set(names)) == len(names) > 25
