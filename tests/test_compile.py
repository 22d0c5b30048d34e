"""Every kernel compiles for every architecture, in float32 and in registers. Needs no GPU."""

import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from numba import cuda, float32, int32, uint16, void

from numbagpt.config import PRESETS
from numbagpt.errors import UserError
from numbagpt.gpu import offline
from numbagpt.gpu.kernel import device_function, kernel
from numbagpt.ops.rows import PRESET_CHANNELS

KERNELS = [(k, signature) for k in offline.program_kernels() for signature in k.signatures]
NAMES = [f"{k.__name__}-{offline.storage(signature)}" for k, signature in KERNELS]
COMPILATIONS = [
    pytest.param(k, signature, cc, id="{}-{}.{}".format(name, *cc))
    for name, (k, signature) in zip(NAMES, KERNELS, strict=True)
    for cc in offline.architectures(k, signature)
]


@pytest.mark.parametrize(("k", "signature", "cc"), COMPILATIONS)
def test_kernel(k, signature, cc):
    ptx = offline.compile_ptx(k, signature, cc)
    assert offline.float64_instructions(ptx) == [], "a constant or argument is a Python float"
    found = offline.assemble(ptx)
    assert found.spills == 0, f"too few registers for {k.max_threads} threads: {found}"
    assert found.stack == 0, f"a local array is not in registers: {found}"
    assert found.repairs == 0, f"wgmma has to wait where it should not: {found}"


def test_names_tell_kernels_apart():
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


def test_every_operation_is_there():
    modules = {k.__module__.removeprefix("numbagpt.ops.") for k, _ in KERNELS}
    assert modules >= {
        "adamw",
        "classifier",
        "column_sum",
        "encoder",
        "flash_mma",
        "flash_mma_backward",
        "flash_wgmma",
        "flash_wgmma_backward",
        "gelu",
        "global_norm",
        "layernorm",
        "layernorm_backward",
        "layernorm_partials",
        "mean_loss",
        "permute",
        "residual",
        "softmax",
        "transpose",
    }


def test_the_presets_sizes_are_there():
    assert {config.channels for config in PRESETS.values()} == set(PRESET_CHANNELS)


@pytest.mark.parametrize(
    ("keywords", "storage", "expected"),
    [
        ({}, float32, [(7, 5), (8, 0), (9, 0), (10, 0)]),
        ({}, uint16, [(8, 0), (9, 0), (10, 0)]),
        ({"minimum": (8, 0)}, float32, [(8, 0), (9, 0), (10, 0)]),
        ({"minimum": (9, 0)}, uint16, [(9, 0), (10, 0)]),
        ({"exactly": (9, 0)}, uint16, [(9, 0)]),
    ],
)
def test_architectures(keywords, storage, expected):
    def nothing(out, inp):
        pass

    with mock.patch("numbagpt.gpu.kernel._registry", []):
        k = kernel(void(float32[::1], storage[::1]), max_threads=32, **keywords)(nothing)
    assert offline.architectures(k, k.signatures[0]) == expected


# That the checks find what they look for: kernels with each of the faults.


@kernel(void(float32[::1]), max_threads=32)
def float64_kernel(out):
    out[0] = out[0] * 0.5 + 1e-9


@kernel(void(float32[::1], int32), max_threads=32)
def stack_kernel(out, i):
    """Registers have no addresses: what is indexed with a variable has to be in memory."""
    x = cuda.local.array(64, float32)
    for k in range(64):
        x[(i * k) % 64] = out[k]
    out[0] = x[i]


@kernel(void(float32[::1]), max_threads=1024, min_blocks=2)
def spilling_kernel(out):
    """64 values that all live at once, where a thread may have 32 registers."""
    x = cuda.local.array(64, float32)
    for k in range(64):
        x[k] = out[k]
    cuda.syncthreads()
    for k in range(64):
        out[k] = x[63 - k]


@kernel(void(float32[::1]), max_threads=32)
def shared_kernel(out):
    x = cuda.shared.array(32, float32)
    x[cuda.threadIdx.x] = out[cuda.threadIdx.x]
    cuda.syncthreads()
    out[cuda.threadIdx.x] = x[31 - cuda.threadIdx.x]


def ptx_of(k):
    return offline.compile_ptx(k, k.signatures[0], (9, 0))


def test_float64_is_found():
    assert offline.float64_instructions(ptx_of(float64_kernel))
    assert not offline.float64_instructions(ptx_of(shared_kernel))


@device_function
def quotient_of_exponential(x, y):
    return math.exp(x) / y if x == x else y


@kernel(void(float32[::1]), max_threads=32)
def body_kernel(out):
    x, y = out[0], out[1]
    out[2] = math.exp(x) / y if x == x else y


@kernel(void(float32[::1]), max_threads=32)
def device_function_kernel(out):
    out[2] = quotient_of_exponential(out[0], out[1])


def test_fastmath_stops_at_device_functions():
    """What kernel() and device_function() say of it; NaN is told from numbers in both."""
    body, function = ptx_of(body_kernel), ptx_of(device_function_kernel)
    assert "div.approx.ftz.f32" in body
    assert "div.full.ftz.f32" in function
    assert body.count("fma.rn") == 0  # math.exp is a product and ex2.approx
    assert function.count("fma.rn") >= 2  # the reduction of its argument
    assert "setp.nan" in body or "setp.num" in body
    assert "setp.nan" in function or "setp.num" in function


@pytest.mark.parametrize(
    "name", ["global_norm_partial_kernel", "global_norm_kernel", "mean_loss_kernel"]
)
def test_no_fastmath_where_nan_has_to_arrive(name):
    (k,) = (k for k, _ in KERNELS if k.__name__ == name)
    ptx = ptx_of(k)
    assert ".ftz" not in ptx
    assert ".approx" not in ptx


def test_stack_is_found():
    assert offline.inspect(stack_kernel, stack_kernel.signatures[0], (9, 0)).stack >= 256


def test_spills_are_found():
    resources = offline.assemble(ptx_of(spilling_kernel))
    assert resources.registers <= 32
    assert resources.spills > 0


def test_shared_memory_is_counted():
    resources = offline.assemble(ptx_of(shared_kernel))
    assert (resources.shared, resources.stack, resources.spills) == (128, 0, 0)


def test_architecture_is_that_asked_for():
    for major, minor in offline.ARCHITECTURES:
        ptx = offline.compile_ptx(shared_kernel, shared_kernel.signatures[0], (major, minor))
        assert f".target sm_{major}{minor}" in ptx


def test_what_ptxas_refuses_is_an_error():
    with pytest.raises(RuntimeError, match="sm_90"):
        offline.assemble(ptx_of(shared_kernel).replace("bar.sync", "no.such.instruction"))


def test_no_ptxas(monkeypatch):
    monkeypatch.setattr(offline, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"no ptxas found.*pip install"):
        offline.assemble(".target sm_90")


def test_table(capsys):
    assert offline.main(["mean_loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "kernel", "storage", "cc", "registers", "stack", "spills", "shared", "f64",
    ]  # fmt: skip
    table = np.array([line.split() for line in lines[1:]])
    assert table[:, 0].tolist() == ["mean_loss_kernel"] * 4
    assert table[:, 2].tolist() == ["7.5", "8.0", "9.0", "10.0"]
    assert (table[:, 3].astype(int) > 0).all()
    assert (table[:, 6] == "128").all()


def test_table_of_nothing():
    with pytest.raises(UserError, match="no_such_kernel"):
        offline.main(["no_such_kernel"])
