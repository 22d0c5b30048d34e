"""The operations of a training step, each with the bytes and FLOPs that it cannot do without."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numba import cuda

from numbagpt.bench.timing import fill
from numbagpt.config import GPT2Config
from numbagpt.gpu import blas
from numbagpt.gpu.vec import float32_to_bf16
from numbagpt.ops.adamw import adamw_update
from numbagpt.ops.attention import attention_backward, attention_forward
from numbagpt.ops.classifier import fused_classifier
from numbagpt.ops.encoder import encoder_backward, encoder_forward, token_runs
from numbagpt.ops.flash_attention import (
    flash_attention_backward,
    flash_attention_forward,
    flash_attention_scratch,
)
from numbagpt.ops.gelu import gelu_backward, gelu_backward_scratch, gelu_forward
from numbagpt.ops.global_norm import global_norm, global_norm_partials
from numbagpt.ops.layernorm import (
    layernorm_backward,
    layernorm_backward_scratch,
    layernorm_forward,
)
from numbagpt.ops.matmul import (
    matmul_backward_bias,
    matmul_backward_bias_scratch,
    matmul_backward_weight,
    matmul_forward,
    matmul_gelu_forward,
)
from numbagpt.ops.permute import permute, unpermute
from numbagpt.ops.residual import residual_forward
from numbagpt.ops.softmax import softmax_backward, softmax_forward
from numbagpt.ops.transpose import transpose

MakeCall = Callable[[], Callable[[], None]]

# Of the cases that go over all parameters, whatever the model: those of GPT-2 124M, about.
ADAMW_PARAMETERS = 1 << 27


@dataclass(frozen=True)
class Case:
    """One row of the table: what to run, and the bytes or FLOPs that it must take."""

    name: str
    shape: str
    make_call: MakeCall
    nbytes: int
    flops: int = 0


class Arrays:
    """Random device arrays; bf16 or float32 storage for activations and weights.

    Normal numbers, a block of them repeated: only the speed of what is done with them matters.
    """

    def __init__(self, storage: type) -> None:
        self.storage = np.dtype(storage)
        self._rng = np.random.default_rng(1)
        self._block = self._rng.standard_normal(1 << 20, dtype=np.float32)
        self._on_device: dict[np.dtype, object] = {}

    def _random(self, shape: tuple[int, ...], dtype: np.dtype) -> object:
        if dtype not in self._on_device:
            block = self._block if dtype == np.float32 else float32_to_bf16(self._block)
            self._on_device[dtype] = cuda.to_device(block)
        return fill(cuda.device_array(shape, dtype), self._on_device[dtype])

    def floats(self, *shape: int) -> object:
        """float32 numbers."""
        return self._random(shape, np.dtype(np.float32))

    def stored(self, *shape: int) -> object:
        """Numbers in the storage type."""
        return self._random(shape, self.storage)

    def copy(self, array: np.ndarray) -> object:
        """The numbers of the host's array."""
        return cuda.to_device(array)

    def tokens(self, *shape: int, below: int) -> np.ndarray:
        """int32 tokens on the host, frequent ones and rare ones as in text (Zipf)."""
        return (self._rng.zipf(1.2, shape) % below).astype(np.int32)


def cases(
    config: GPT2Config, B: int, T: int, storage: type = np.float32, transposes: bool = False
) -> Iterator[Case]:
    """The operations of a training step of this model on batches of (B, T).

    transposes: whether the weights' gradients are computed by way of a transpose.
    Of the bytes, those of a number for each row or channel are left out: they are too few to count.
    No array is made before a case's make_call is called.
    """
    C, NH, Vp, V = config.channels, config.num_heads, config.padded_vocab_size, config.vocab_size
    N, HS = B * T, config.head_size
    arrays = Arrays(storage)
    stored, floats = arrays.stored, arrays.floats
    s = arrays.storage.itemsize
    act = s * N * C  # bytes of one (B, T, C) activation
    btc = f"({B}, {T}, {C})"

    def case(name: str, shape: str, make: MakeCall, nbytes: int, flops: int = 0) -> Case:
        return Case(name, shape, make, nbytes, flops)

    def call(function: Callable, *make_arguments: object) -> MakeCall:
        """Arguments that are callable are made anew for each set of buffers."""

        def make_call() -> Callable[[], None]:
            arguments = [a() if callable(a) else a for a in make_arguments]
            return lambda: function(*arguments)

        return make_call

    def x(*shape: int) -> Callable[[], object]:
        return lambda: stored(*shape)

    def f(*shape: int) -> Callable[[], object]:
        return lambda: floats(*shape)

    def once(make: Callable[..., object], *arguments: object) -> Callable[[], object]:
        """One array for all sets of buffers."""
        return functools.cache(lambda: make(*arguments))

    tokens = arrays.tokens(B, T, below=V)
    inp, order, starts = (once(arrays.copy, a) for a in (tokens, *token_runs(tokens)))
    distinct = np.unique(tokens).size
    yield case(
        "encoder_forward",
        btc,
        call(encoder_forward, x(B, T, C), inp, x(Vp, C), x(T, C)),
        act + s * distinct * C + s * T * C,
    )
    yield case(
        "encoder_backward",
        btc,
        call(encoder_backward, f(Vp, C), f(T, C), x(B, T, C), inp, order, starts),
        # dout is read for two sums, by token and by position: no order of its rows serves both
        2 * act + 8 * distinct * C + 8 * T * C,
    )
    yield case(
        "layernorm_forward",
        btc,
        call(layernorm_forward, x(B, T, C), f(B, T), f(B, T), x(B, T, C), x(C), x(C)),
        2 * act,
    )
    scratch = once(floats, layernorm_backward_scratch(N, C))
    yield case(
        "layernorm_backward",
        btc,
        call(
            layernorm_backward,
            *(x(B, T, C), f(C), f(C), x(B, T, C), x(B, T, C), x(C), f(B, T), f(B, T), scratch),
        ),
        4 * act,
    )
    yield case(
        "layernorm_backward, dbias",
        btc,
        call(
            layernorm_backward,
            *(x(B, T, C), f(C), f(C), x(B, T, C), x(B, T, C), x(C), f(B, T), f(B, T), scratch),
            f(C),
        ),
        4 * act,
    )
    yield case(
        "residual_forward",
        btc,
        call(residual_forward, x(B, T, C), x(B, T, C), x(B, T, C)),
        3 * act,
    )
    wide = f"({B}, {T}, {4 * C})"
    yield case("gelu_forward", wide, call(gelu_forward, x(N, 4 * C), x(N, 4 * C)), 8 * act)
    scratch = once(floats, gelu_backward_scratch(N, 4 * C))
    yield case(
        "gelu_backward",
        wide,
        call(gelu_backward, x(N, 4 * C), f(4 * C), x(N, 4 * C), x(N, 4 * C), scratch),
        12 * act,
    )
    scratch = once(floats, matmul_backward_bias_scratch(N, 4 * C))
    yield case(
        "matmul_backward_bias",
        wide,
        call(matmul_backward_bias, f(4 * C), x(N, 4 * C), scratch),
        4 * act,
    )
    # Half of the scores are masked: two products of half the size forward, five backward.
    heads, flops = f"({B}, {NH}, {T}, {HS})", 2 * B * NH * T * T * HS
    yield case(
        "flash_attention_forward",
        heads,
        call(flash_attention_forward, x(B, T, C), f(B, NH, T), x(B, T, 3 * C)),
        4 * act,
        flops,
    )
    scratch = once(floats, flash_attention_scratch(B, T, C, NH))
    backward = x(B, T, 3 * C), x(B, T, C), x(B, T, 3 * C), x(B, T, C), f(B, NH, T), scratch
    for name, dqkvb in (
        ("flash_attention_backward", None),
        ("flash_attention_backward, dbias", f(3 * C)),
    ):
        make_call = call(flash_attention_backward, *backward, dqkvb)
        yield case(name, heads, make_call, 8 * act, 5 * flops // 2)
    if storage == np.float32:
        yield from _materialized_attention(B, T, C, NH, HS, call, f)
    yield case(
        "fused_classifier",
        f"({B}, {T}, {Vp})",
        call(_classifier(V), x(B, T, Vp), f(B, T), inp),
        2 * s * N * Vp,
    )
    P = ADAMW_PARAMETERS
    hyper = once(arrays.copy, np.array([1e-4, 0.1, 0.05], np.float32))
    one = once(arrays.copy, np.ones(1, np.float32))
    yield case(
        "adamw_update",
        f"({P},)",
        call(adamw_update, f(P), f(P), f(P), f(P), hyper, one, 0.9, 0.95, 1e-8, 0.1),
        28 * P,
    )
    if storage == np.uint16:
        yield case(
            "adamw_update, bf16 copy",
            f"({P},)",
            call(
                adamw_update,
                *(f(P), f(P), f(P), f(P), hyper, one, 0.9, 0.95, 1e-8, 0.1),
                lambda: stored(P),
            ),
            30 * P,
        )
    yield case(
        "global_norm",
        f"({P},)",
        call(global_norm, f(1), f(1), f(P), f(global_norm_partials(P)), 1.0),
        4 * P,
    )
    yield case(
        "matmul_gelu_forward fc",
        f"({N}, {C}) x ({C}, {4 * C})",
        call(matmul_gelu_forward, x(N, 4 * C), x(N, 4 * C), x(N, C), x(4 * C, C), x(4 * C)),
        s * (N * C + 4 * C * C + 8 * N * C),
        8 * N * C * C,
    )
    room = f(N * C) if transposes else None
    if transposes:
        yield case("transpose", f"({N}, {C})", call(transpose, f(C, N), f(N, C)), 2 * act)
    for name, K, OC in (
        ("qkv", C, 3 * C),
        ("attproj", C, C),
        ("fc", C, 4 * C),
        ("fcproj", 4 * C, C),
        ("lm-head", C, Vp),
    ):
        bias = None if name == "lm-head" else x(OC)
        yield case(
            f"matmul_forward {name}",
            f"({N}, {K}) x ({K}, {OC})",
            call(matmul_forward, x(N, OC), x(N, K), x(OC, K), bias),
            s * (N * K + OC * K + N * OC),
            2 * N * K * OC,
        )
        yield case(
            f"matmul dX {name}",
            f"({N}, {OC}) x ({OC}, {K})",
            call(blas.matmul, x(N, K), x(N, OC), x(OC, K)),
            s * (N * K + OC * K + N * OC),
            2 * N * K * OC,
        )
        yield case(
            f"matmul dW {name}",
            f"({OC}, {N}) x ({N}, {K})",
            call(_backward_weight, f(OC, K), x(N, OC), x(N, K), room),
            s * (N * K + N * OC) + 8 * OC * K,
            2 * N * K * OC,
        )


def _materialized_attention(B, T, C, NH, HS, call, f) -> Iterator[Case]:
    """Bytes of the whole are the sum of its parts': each reads what the one before has written."""
    qkv, heads, square = (B, T, 3 * C), (B, NH, T, HS), (B, NH, T, T)
    act, att = 4 * B * T * C, 4 * B * NH * T * T
    flops = 4 * B * NH * T * T * HS
    shape = f"({B}, {NH}, {T}, {HS})"
    inp = f(max(B * T * 3 * C, B * NH * T * T))
    yield Case("permute", shape, call(permute, f(3, *heads), f(*qkv)), 6 * act)
    yield Case("unpermute", shape, call(unpermute, f(B, T, C), f(*heads)), 2 * act)
    triangle = f"{square}, lower half"
    yield Case(
        "softmax_forward", triangle, call(softmax_forward, f(*square), f(*square), 0.125), att
    )
    yield Case(
        "softmax_backward",
        triangle,
        call(softmax_backward, f(*square), f(*square), f(*square), 0.125),
        3 * att // 2,
    )
    yield Case(
        "attention_forward",
        shape,
        call(attention_forward, f(B, T, C), f(3, *heads), f(*square), inp),
        12 * act + 3 * att,
        flops,
    )
    yield Case(
        "attention_backward",
        shape,
        call(
            attention_backward,
            *(f(*qkv), f(3, *heads), f(*square), inp, f(B, T, C), f(B, T, C), f(3, *heads)),
            f(*square),
        ),
        16 * act + 11 * att // 2,
        2 * flops,
    )


def _classifier(V: int) -> Callable:
    def run(logits: object, losses: object, targets: object) -> None:
        fused_classifier(logits, losses, None, None, targets, V)

    return run


def _backward_weight(dweight: object, dout: object, inp: object, room: object | None) -> None:
    matmul_backward_weight(dweight, dout, inp, transposed=room)
