"""The benchmarks' tables and flags, with times made up in place of measured ones."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from numba.cuda.cudadrv.driver import CudaAPIError

from numbagpt.bench import __main__ as bench
from numbagpt.bench import kernels, timing, train
from numbagpt.config import PRESETS
from numbagpt.errors import OutOfMemory, UserError
from numbagpt.gpu import blas
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


@pytest.mark.parametrize("finds_gpu", [True, False])
def test_a_pytorch_without_the_gpu_is_left_out(monkeypatch, capsys, finds_gpu):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name == "torch" or None)
    torch = ModuleType("torch")
    torch.__version__, torch.cuda = "2.9+cpu", SimpleNamespace(is_available=lambda: finds_gpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert bench.has_pytorch() is finds_gpu
    said = (
        "PyTorch is left out: version 2.9+cpu finds no GPU; install one for the driver's CUDA to "
        "have it measured\n"
    )
    assert capsys.readouterr() == ("", "" if finds_gpu else said)


def test_a_pytorch_that_is_not_there_is_not_missed(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.has_pytorch() is False
    assert capsys.readouterr() == ("", "")


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


# --- flags ---


@pytest.fixture
def hopper(monkeypatch):
    """The flags are read as on a machine with a GPU of that kind."""
    gpu = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(bench.runtime, "gpu_problem", lambda: None)
    monkeypatch.setattr(bench.runtime, "gpu_info", lambda: gpu)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["kernels", "--only", "geluu"], "--only 'geluu' is in no operation's name; expected a "),
        (["all", "--only", "geluu"], "--only 'geluu' is in no operation's name; expected a "),
    ],
)
def test_wrong_values_are_refused_before_anything_is_measured(hopper, capsys, flags, message):
    with pytest.raises(UserError) as error:
        bench.main([*flags, "--precision", "bf16", "--peer", "0"])
    assert str(error.value).startswith(message)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["steps"], "there is no 'steps' to measure; expected one of all, train, kernels"),
        (["--device", "cpu"], "unrecognized arguments: --device"),
        (["--model", "d13"], "--model d13; expected one of nano, d12, "),
        (["--batch_sizes", "4,x"], "--batch_sizes: 'x' is not a whole number from 1 to "),
        (["--batch_sizes", ""], "--batch_sizes: '' is not a whole number from 1 to "),
        (["--batch_sizes", "0"], "--batch_sizes: '0' is not a whole number from 1 to "),
        (["--sequence_length", "0"], "--sequence_length: '0' is not a whole number from 1 to "),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
        (["--recompute", "3"], "--recompute: '3' is not a whole number from 0 to 2"),
    ],
)
def test_flags_out_of_range(capsys, flags, named):
    with pytest.raises(SystemExit) as stop:
        bench.main(flags)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(bench.runtime, "gpu_problem", lambda: "no NVIDIA driver found")
    with pytest.raises(UserError, match="the benchmarks need a GPU: no NVIDIA driver found"):
        bench.main([])


def test_what_is_selected_follows_the_flags(hopper, monkeypatch, capsys):
    monkeypatch.setattr(blas, "_precision", blas.precision())  # put back afterwards
    shapes = {}

    def report(chosen, theirs):
        shapes.update((case.name, case.shape) for case in chosen)
        return ["a line"]

    monkeypatch.setattr(kernels, "report", report)
    flags = ["kernels", "--precision", "tf32", "--peer", "0", "--model", "nano"]
    assert bench.main([*flags, "--batch_sizes", "1,3", "--sequence_length", "32"]) == 0
    assert capsys.readouterr().out == "a line\n"
    assert shapes["layernorm_forward"] == "(3, 32, 128)"
    assert "permute" in shapes  # materialized attention, which float32 has
    assert shapes["transpose"] == "(96, 128)"  # which TF32 on Hopper profits from
    assert blas.precision() == "tf32"
