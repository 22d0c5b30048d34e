"""Causal self-attention of NH heads (Vaswani et al., Attention Is All You Need, 2017).

Per sequence and head, with q, k, v (T, HS) and the softmax over t2 <= t:

    preatt = q k^T                              (T, T)
    att    = softmax(preatt / sqrt(HS))         (T, T)
    out    = att v                              (T, HS)

Backward, from the gradient of out:

    datt = dout v^T             dv = att^T dout
    dpreatt from datt and att   (softmax.py)
    dq = dpreatt k              dk = dpreatt^T q

The products are batched matmuls over the B*NH heads; what lies between them is in permute.py and
softmax.py. The path of the data forwards:

    inp     (B, T, 3, NH, HS)   QKV as its matmul leaves it
    qkvr    (3, B, NH, T, HS)   permuted
    preatt  (B, NH, T, T)
    att     (B, NH, T, T)
    vaccum  (B, NH, T, HS)
    out     (B, T, C)           permuted back; C = NH * HS

att and dpreatt are written on and below the diagonal only, but the products that follow read all of
either: the caller zeroes both once, when it allocates them or lays them out for another shape.

The launchers take float32 alone; bf16 has flash attention. The references take any float type.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numbagpt.gpu import blas
from numbagpt.ops.permute import (
    permute,
    permute_backward,
    permute_backward_reference,
    permute_reference,
    unpermute,
    unpermute_backward,
    unpermute_backward_reference,
    unpermute_reference,
)
from numbagpt.ops.softmax import (
    softmax_backward,
    softmax_backward_reference,
    softmax_forward,
    softmax_forward_reference,
)


class Operations(NamedTuple):
    """What lies between the products."""

    permute: Callable
    permute_backward: Callable
    unpermute: Callable
    unpermute_backward: Callable
    softmax_forward: Callable
    softmax_backward: Callable


KERNELS = Operations(
    permute, permute_backward, unpermute, unpermute_backward, softmax_forward, softmax_backward
)
REFERENCES = Operations(
    permute_reference,
    permute_backward_reference,
    unpermute_reference,
    unpermute_backward_reference,
    softmax_forward_reference,
    softmax_backward_reference,
)


def _shapes(qkvr):
    """Shapes of the heads' matrices (B*NH, T, HS) and (B*NH, T, T), and the factor 1 / sqrt(HS)."""
    _, B, NH, T, HS = qkvr.shape
    return (B * NH, T, HS), (B * NH, T, T), 1.0 / math.sqrt(HS)


def _split(qkvr, heads):
    """Views of q, k and v as batches of matrices."""
    flat = qkvr.reshape(-1)
    n = flat.size // 3
    return [flat[i * n : (i + 1) * n].reshape(heads) for i in range(3)]


def _forward(ops: Operations, out, qkvr, att, inp) -> None:
    heads, scores, scale = _shapes(qkvr)
    ops.permute(qkvr, inp[: qkvr.size])
    q, k, v = _split(qkvr, heads)
    att = att.reshape(scores)
    preatt = inp[: att.size].reshape(scores)
    blas.matmul(preatt, q, k, transpose_b=True)
    ops.softmax_forward(att, preatt, scale)
    vaccum = inp[: out.size].reshape(heads)
    blas.matmul(vaccum, att, v)
    ops.unpermute(out, vaccum.reshape(qkvr.shape[1:]))


def _backward(ops: Operations, dinp, dqkvr, dpreatt, datt, scratch, dout, qkvr, att) -> None:
    heads, scores, scale = _shapes(qkvr)
    q, k, v = _split(qkvr, heads)
    dq, dk, dv = _split(dqkvr, heads)
    dvaccum = scratch.reshape(-1)[: dout.size].reshape(heads)
    datt = datt.reshape(-1)[: att.size].reshape(scores)
    att = att.reshape(scores)
    dpreatt = dpreatt.reshape(scores)

    ops.unpermute_backward(dvaccum.reshape(qkvr.shape[1:]), dout)
    blas.matmul(datt, dvaccum, v, transpose_b=True)
    blas.matmul(dv, att, dvaccum, transpose_a=True)
    ops.softmax_backward(dpreatt, datt, att, scale)
    blas.matmul(dq, dpreatt, k)
    blas.matmul(dk, dpreatt, q, transpose_a=True)
    ops.permute_backward(dinp, dqkvr)


def attention_forward(out, qkvr, att, inp) -> None:
    """Attention of every head to the tokens up to its own.

    out   (B, T, C)           written
    qkvr  (3, B, NH, T, HS)   written: q, k, v by head, for the backward pass
    att   (B, NH, T, T)       written on and below the diagonal; zero above it
    inp   flat; starts with QKV (B, T, 3, NH, HS) and is overwritten: preatt and the heads' outputs
          take their turn in its memory. At least max(B*T*3C, B*NH*T*T) long

    All are float32; C is a multiple of 4.
    """
    _forward(KERNELS, out, qkvr, att, inp)


def attention_forward_reference(
    out: np.ndarray, qkvr: np.ndarray, att: np.ndarray, inp: np.ndarray
) -> None:
    """What attention_forward computes, in NumPy and in the arrays' own precision."""
    _forward(REFERENCES, out, qkvr, att, inp)


def attention_backward(dinp, dqkvr, dpreatt, datt, scratch, dout, qkvr, att) -> None:
    """Gradients of attention_forward.

    dinp     (B, T, 3C)          written
    dqkvr    (3, B, NH, T, HS)   written
    dpreatt  (B, NH, T, T)       written on and below the diagonal; zero above it
    datt     at least B*NH*T*T   overwritten
    scratch  at least B*T*C      overwritten
    dout     (B, T, C)
    qkvr, att                    as attention_forward left them

    All are float32; C is a multiple of 4.
    """
    _backward(KERNELS, dinp, dqkvr, dpreatt, datt, scratch, dout, qkvr, att)


def attention_backward_reference(
    dinp: np.ndarray,
    dqkvr: np.ndarray,
    dpreatt: np.ndarray,
    datt: np.ndarray,
    scratch: np.ndarray,
    dout: np.ndarray,
    qkvr: np.ndarray,
    att: np.ndarray,
) -> None:
    """What attention_backward computes, in NumPy and in the arrays' own precision."""
    _backward(REFERENCES, dinp, dqkvr, dpreatt, datt, scratch, dout, qkvr, att)
