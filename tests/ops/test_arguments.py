"""Launchers refuse arrays that do not go together before any kernel runs, with one clear line."""

from collections.abc import Callable

import numpy as np
import pytest

from numbagpt.ops.adamw import adamw_update
from numbagpt.ops.encoder import encoder_backward, encoder_forward, token_runs
from numbagpt.ops.gelu import gelu_backward, gelu_backward_scratch, gelu_forward
from numbagpt.ops.global_norm import global_norm, global_norm_partials
from numbagpt.ops.layernorm import (
    layernorm_backward,
    layernorm_backward_scratch,
    layernorm_forward,
)
from numbagpt.ops.matmul import matmul_backward_bias, matmul_backward_bias_scratch
from numbagpt.ops.mean_loss import mean_loss
from numbagpt.ops.permute import permute, permute_backward, unpermute, unpermute_backward
from numbagpt.ops.residual import residual_forward
from numbagpt.ops.softmax import softmax_backward, softmax_forward

B, T, NH, VP = 2, 3, 2, 11
N = B * T
TOKENS = np.arange(N, dtype=np.int32).reshape(B, T)
Arrays = dict[str, np.ndarray]


def arrays_of(launcher: Callable, C: int, storage: type = np.float32) -> Arrays:
    """Arguments that go together, by name: 2 sequences of 3 tokens with C channels."""

    def stored(*shape: int) -> np.ndarray:
        return np.zeros(shape, storage)

    def floats(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    btc, heads, square = (B, T, C), (B, NH, T, C // NH), (B, NH, T, T)
    order, starts = token_runs(TOKENS)
    flat = {name: floats(C) for name in ("params", "grads", "m", "v")}
    rows = {name: stored(*btc) for name in ("dinp", "dout", "inp")}
    columns = {"dweight": floats(C), "dbias": floats(C)}
    statistics = {"mean": floats(B, T), "rstd": floats(B, T)}
    dout_and_inp = {"dout": rows["dout"], "inp": rows["inp"]}
    qkv = {"heads": floats(3, *heads), "rows": floats(B, T, 3 * C)}
    one = {"heads": floats(*heads), "rows": floats(*btc)}
    return {
        gelu_forward: {"out": stored(*btc), "inp": rows["inp"]},
        gelu_backward: {
            "dinp": rows["dinp"],
            "dbias": floats(C),
            **dout_and_inp,
            "scratch": floats(gelu_backward_scratch(N, C)),
        },
        residual_forward: {"out": stored(*btc), "inp1": stored(*btc), "inp2": stored(*btc)},
        encoder_forward: {
            "out": stored(*btc),
            "inp": TOKENS.copy(),
            "wte": stored(VP, C),
            "wpe": stored(T, C),
        },
        encoder_backward: {
            "dwte": floats(VP, C),
            "dwpe": floats(T, C),
            "dout": rows["dout"],
            "inp": TOKENS.copy(),
            "order": order,
            "starts": starts,
        },
        layernorm_forward: {
            "out": stored(*btc),
            **statistics,
            "inp": rows["inp"],
            "weight": stored(C),
            "bias": stored(C),
        },
        layernorm_backward: {
            "dinp": rows["dinp"],
            **columns,
            **dout_and_inp,
            "weight": stored(C),
            **statistics,
            "scratch": floats(layernorm_backward_scratch(N, C)),
            "dresidual_sum": floats(C),
        },
        matmul_backward_bias: {
            "dbias": floats(C),
            "dout": rows["dout"],
            "scratch": floats(matmul_backward_bias_scratch(N, C)),
        },
        permute: qkv,
        permute_backward: dict(reversed(qkv.items())),
        unpermute: dict(reversed(one.items())),
        unpermute_backward: one,
        softmax_forward: {"att": floats(*square), "preatt": floats(*square)},
        softmax_backward: {name: floats(*square) for name in ("dpreatt", "datt", "att")},
        mean_loss: {"out": floats(1), "losses": floats(B, T)},
        global_norm: {
            "norm": floats(1),
            "grad_scale": floats(1),
            "grads": floats(C),
            "partials": floats(global_norm_partials(C)),
        },
        adamw_update: {**flat, "hyper": floats(3), "grad_scale": floats(1)},
    }[launcher]


# What follows the arrays.
SCALARS = {
    softmax_forward: (1.0,),
    softmax_backward: (1.0,),
    mean_loss: (1.0,),
    global_norm: (1.0,),
    adamw_update: (0.9, 0.95, 1e-8, 0.1),
}
# The arrays that kernels access 16 bytes at a time.
VECTORS = {
    gelu_forward: ("out", "inp"),
    gelu_backward: ("dinp", "dout", "inp", "scratch"),
    residual_forward: ("out", "inp1", "inp2"),
    encoder_forward: ("out", "wte", "wpe"),
    encoder_backward: ("dwte", "dwpe", "dout"),
    layernorm_forward: ("out", "inp", "weight", "bias"),
    layernorm_backward: ("dinp", "dout", "inp", "weight", "scratch"),
    matmul_backward_bias: ("dout", "scratch"),
    permute: ("heads", "rows"),
    permute_backward: ("heads", "rows"),
    unpermute: ("heads", "rows"),
    unpermute_backward: ("heads", "rows"),
    softmax_forward: ("att", "preatt"),
    softmax_backward: ("dpreatt", "datt", "att"),
    mean_loss: ("losses",),
    global_norm: ("grads",),
    adamw_update: ("params", "grads", "m", "v"),
}
# Of these any number of rows, or of elements, is right.
ANY_LENGTH = {
    (encoder_forward, "wte"),
    (encoder_backward, "dwte"),
    (matmul_backward_bias, "dout"),
    (mean_loss, "losses"),
    (global_norm, "grads"),
}
# These take single elements where vectors do not fit.
ANY_ROW = {softmax_forward, softmax_backward, mean_loss, global_norm, adamw_update}


def refusal(launcher: Callable, arrays: Arrays) -> str:
    """What the launcher says of the arrays, which it must leave as they are."""
    before = {name: array.copy() for name, array in arrays.items()}
    with pytest.raises(ValueError, match=f"^{launcher.__name__}: .* expected ") as caught:
        launcher(*arrays.values(), *SCALARS.get(launcher, ()))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("launcher", VECTORS, ids=lambda f: f.__name__)
def test_arrays_that_go_together_are_taken(launcher):
    launcher(*arrays_of(launcher, 16).values(), *SCALARS.get(launcher, ()))


SIZES = [
    pytest.param(launcher, name, id=f"{launcher.__name__}-{name}")
    for launcher in VECTORS
    for name in arrays_of(launcher, 16)
    if (launcher, name) not in ANY_LENGTH
]


@pytest.mark.parametrize(("launcher", "name"), SIZES)
def test_an_array_that_is_too_short_is_refused(launcher, name):
    """Where the others' sizes follow from it, it is they that seem wrong."""
    arrays = arrays_of(launcher, 16)
    arrays[name] = arrays[name][:-1]
    assert "elements, shape " in refusal(launcher, arrays)


@pytest.mark.parametrize(
    ("launcher", "name"), [(encoder_forward, "wte"), (encoder_backward, "dwte")]
)
def test_rows_of_other_lengths_are_refused(launcher, name):
    arrays = arrays_of(launcher, 16)
    arrays[name] = np.zeros((VP, 12), np.float32)
    assert f"{name} has {VP * 12} elements, shape ({VP}, 12); expected {VP * 16}" in refusal(
        launcher, arrays
    )


ADDRESSES = [
    pytest.param(launcher, name, id=f"{launcher.__name__}-{name}")
    for launcher, names in VECTORS.items()
    for name in names
]


@pytest.mark.parametrize(("launcher", "name"), ADDRESSES)
def test_an_array_off_the_16_byte_grid_is_refused(launcher, name):
    arrays = arrays_of(launcher, 16)
    shape = arrays[name].shape
    arrays[name] = np.zeros(arrays[name].size + 2, np.float32)[2:].reshape(shape)  # 8 bytes off
    assert " starts at 0x" in (message := refusal(launcher, arrays))
    assert "expected a multiple of 16 bytes" in message


def test_a_copy_off_the_16_byte_grid_is_refused():
    arrays = arrays_of(adamw_update, 16)
    copy = np.zeros(17, np.uint16)[1:]
    with pytest.raises(ValueError, match=r"^adamw_update: copy starts at 0x"):
        adamw_update(*arrays.values(), *SCALARS[adamw_update], copy=copy)
    with pytest.raises(ValueError, match=r"^adamw_update: copy has 15 elements, .* expected 16$"):
        adamw_update(*arrays.values(), *SCALARS[adamw_update], copy=copy[:-1])


@pytest.mark.parametrize(
    "launcher", [f for f in VECTORS if f not in ANY_ROW], ids=lambda f: f.__name__
)
def test_rows_that_are_not_whole_vectors_are_refused(launcher):
    flat = launcher in (gelu_forward, residual_forward)
    C = 7 if flat else 6
    message = refusal(launcher, arrays_of(launcher, C))
    row = N * C if flat else C
    assert f"has rows of {row} elements of float32; expected a multiple of 4, whole" in message


@pytest.mark.parametrize(
    "launcher",
    [
        gelu_backward,
        encoder_forward,
        encoder_backward,
        layernorm_forward,
        layernorm_backward,
        matmul_backward_bias,
    ],
    ids=lambda f: f.__name__,
)
def test_bf16_vectors_are_twice_as_wide(launcher):
    message = refusal(launcher, arrays_of(launcher, 12, np.uint16))
    assert "has rows of 12 elements of uint16; expected a multiple of 8, whole" in message


@pytest.mark.parametrize("launcher", [gelu_forward, residual_forward], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [6, 1026])
def test_the_last_elements_are_neither_left_out_nor_overrun(launcher, n):
    arrays = {name: np.ones(n, np.float32) for name in arrays_of(launcher, 4)}
    assert f"out has rows of {n} elements of float32" in refusal(launcher, arrays)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
@pytest.mark.parametrize(("launcher", "name"), ADDRESSES)
def test_an_array_of_another_type_is_refused(launcher, name, dtype):
    arrays = arrays_of(launcher, 16)
    arrays[name] = arrays[name].astype(dtype)
    expected = f"is an array of {np.dtype(dtype)}; expected float32, or uint16, which holds bf16"
    with pytest.raises(TypeError, match=rf"^{launcher.__name__}: \w+ {expected}$"):
        launcher(*arrays.values(), *SCALARS.get(launcher, ()))


@pytest.mark.gpu
def test_device_arrays_are_checked_alike():
    from numba import cuda

    memory = cuda.device_array(17, np.float32)
    with pytest.raises(ValueError, match=r"^gelu_forward: inp starts at 0x"):
        gelu_forward(memory[:16], memory[1:])
    with pytest.raises(ValueError, match=r"^gelu_forward: inp has 12 elements"):
        gelu_forward(memory[:16], memory[:12])
