"""The benchmarks' tables, with times made up in place of measured ones."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from numba.cuda.cudadrv.driver import CudaAPIError

from numbagpt.bench import kernels, timing, train
from numbagpt.config import PRESETS
from numbagpt.errors import OutOfMemory, UserError
from numbagpt.gpu.recording import GraphError

NANO = PRESETS["nano"]
SHAPE = NANO, 2, 64, np.uint16

OUT_OF_MEMORY = [
    CudaAPIError(2, "Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    GraphError("a CUDA graph failed with CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),  # PyTorch's words
    OutOfMemory("B=64, T=512 needs 34,331 MiB and 23,565 MiB are free"),
    MemoryError(),
]


def fails(error):
    def measurement(*_, **__):
        raise error

    return measurement


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Nothing here waits for a GPU or gives memory back to one."""
    gpu = SimpleNamespace(name="GPU", memory_manager=SimpleNamespace(deallocations=[]))
    monkeypatch.setattr(timing.cuda, "current_context", lambda: gpu)
    monkeypatch.setattr(train, "gpu_info", lambda: gpu)


@pytest.fixture
def peer(monkeypatch):
    """A PyTorch that steps in 2 ms with 3 MiB."""
    pytorch = ModuleType("numbagpt.bench.pytorch")
    pytorch.step_seconds = lambda *_: (2e-3, 3 << 20)
    monkeypatch.setitem(sys.modules, pytorch.__name__, pytorch)
    monkeypatch.setattr("numbagpt.bench.pytorch", pytorch, raising=False)
    return pytorch


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_what_does_not_fit_is_none(error):
    assert timing.measure(lambda: 3.0) == 3.0
    assert timing.measure(fails(error)) is None


@pytest.mark.parametrize(
    "error",
    [
        CudaAPIError(700, "Call to cuCtxSynchronize results in CUDA_ERROR_ILLEGAL_ADDRESS"),
        UserError("the longest context is 64"),
    ],
)
def test_other_errors_are_not_hidden(error):
    with pytest.raises(type(error), match=str(error.args[-1])):
        timing.measure(fails(error))


def test_the_table_goes_on_where_an_operation_does_not_fit(monkeypatch):
    chosen = kernels.select(*SHAPE, "gelu")
    assert [case.name for case in chosen] == [
        "gelu_forward", "gelu_backward", "matmul_gelu_forward fc",
    ]  # fmt: skip

    def seconds(make_call, nbytes):
        if make_call is chosen[1].make_call:
            raise OUT_OF_MEMORY[0]
        return 1e-6

    monkeypatch.setattr(kernels, "median_seconds", seconds)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda nbytes: 5.2e11)
    theirs = {"gelu_forward": lambda nbytes: None, "gelu_backward": lambda nbytes: 2e-3}
    copy, heads, *rows = kernels.report(chosen, theirs)
    assert copy == "copy of 1 GiB: 520 GB/s"
    assert heads.split() == "operation shape µs GB/s of peak of copy TFLOP/s PyTorch".split()
    cells = [[row[:26].strip(), *row[62:].split()] for row in rows]
    assert cells == [
        ["gelu_forward", "1.0", "262", "50%", "50%", *"does not fit".split()],
        ["gelu_backward", *"does not fit".split(), "2000.0"],
        ["matmul_gelu_forward fc", "1.0", "426", "16.8"],
    ]


def test_the_table_goes_on_where_the_copy_does_not_fit(monkeypatch):
    monkeypatch.setattr(kernels, "median_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(kernels, "copy_bandwidth", fails(OUT_OF_MEMORY[0]))
    copy, _, row = kernels.report(kernels.select(*SHAPE, "residual"), {})
    assert copy == "copy of 1 GiB: does not fit"
    assert row.split()[-2:] == ["1000.0", "0"]


def test_training_goes_on_where_a_batch_does_not_fit(monkeypatch, peer):
    def step(config, B, T, precision, **_):
        if B == 4:
            raise OUT_OF_MEMORY[3]
        return 1e-3, B << 20, 5e-4

    monkeypatch.setattr(train, "step_seconds", step)
    _, *rows = train.report(NANO, [2, 4], 64, "bf16", peer=True)
    assert rows == [
        "B=  2 numbagpt      1.00 ms    128.0K tok/s  MFU n/a         2 MiB  host 0.50 ms",
        "B=  2 PyTorch       2.00 ms     64.0K tok/s  MFU n/a         3 MiB  2.00x ours",
        "B=  4 numbagpt  does not fit",
        "B=  4 PyTorch       2.00 ms    128.0K tok/s  MFU n/a         3 MiB",
    ]
    peer.step_seconds = lambda *_: None
    _, *rows = train.report(NANO, [2], 64, "bf16", peer=True)
    assert rows[1] == "B=  2 PyTorch   does not fit"
