"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

At step t = 1, 2, … with gradient g, scaled by the factor that clips its norm:

    m = beta1 m + (1 - beta1) g             running mean of the gradient
    v = beta2 v + (1 - beta2) g²            and of its square
    m_hat = m / (1 - beta1^t)               both start at zero; the divisions undo that
    v_hat = v / (1 - beta2^t)
    p = p - learning_rate (m_hat / (sqrt(v_hat) + eps) + weight_decay p)

All in float32. Where the matmuls read the parameters in bf16, the copy they read is written here
too, while the new p is at hand: a step changes p by less than bf16 can resolve, so p itself has to
stay in float32.
"""

import math

import numpy as np
from numba import cuda, float32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.ptx import pack_bf16
from numbagpt.gpu.vec import MAX_WIDTH, float32_to_bf16, load, store, store_half, width
from numbagpt.ops.arguments import check_sizes, check_vectors

BLOCK = 256
# Elements the NumPy reference updates at a time: six arrays of this many stay in the L2 cache.
CHUNK = 1 << 15


def _signature(copy):
    return void(
        *(float32[::1],) * 4,  # params, grads, m, v
        copy[::1],
        *(float32[::1],) * 2,  # hyper, grad_scale
        *(float32,) * 4,  # beta1, beta2, eps, weight_decay
        int64,  # N
    )


@device_function
def lerp(start, end, weight):
    """(1 - weight) start + weight end in two operations, each rounded once.

    start - weight start is one fused multiply-add, adding weight end the other; written out it
    would take three. https://developer.nvidia.com/blog/lerp-faster-cuda
    """
    return cuda.fma(weight, end, cuda.fma(-weight, start, start))


@device_function
def adamw(p, g, m, v, hyper, beta1, beta2, eps, weight_decay):
    """p, m and v of one parameter after a step with gradient g."""
    m = lerp(g, m, beta1)
    v = lerp(g * g, v, beta2)
    m_hat = m / hyper[1]
    v_hat = v / hyper[2]
    p -= hyper[0] * (m_hat / (math.sqrt(v_hat) + eps) + weight_decay * p)
    return p, m, v


@kernel(_signature(float32), _signature(uint16), max_threads=BLOCK)
def adamw_kernel(params, grads, m, v, copy, hyper, grad_scale, beta1, beta2, eps, weight_decay, N):
    """One step of AdamW on N parameters, in place; copy = params, if it stores bf16.

    One thread per 128-bit vector; the thread that meets the end of the arrays takes the last
    N % width elements one by one. Moves 28 N bytes: four arrays read, three written; 2 N more with
    a copy.

    What changes from step to step comes from device memory, hyper = [learning_rate, 1 - beta1^t,
    1 - beta2^t] and the scale, so that a captured graph can be replayed.
    """
    p_vec = cuda.local.array(MAX_WIDTH, float32)
    g_vec = cuda.local.array(MAX_WIDTH, float32)
    m_vec = cuda.local.array(MAX_WIDTH, float32)
    v_vec = cuda.local.array(MAX_WIDTH, float32)
    scale = grad_scale[0]
    if scale < float32(0):
        return
    # A constant: what hangs on it is there or not when the kernel is compiled.
    has_copy = width(copy) > width(params)
    i = cuda.grid(1) * width(params)
    if i + width(params) <= N:
        load(p_vec, params, i)
        load(g_vec, grads, i)
        load(m_vec, m, i)
        load(v_vec, v, i)
        for k in range(width(params)):
            p_vec[k], m_vec[k], v_vec[k] = adamw(
                p_vec[k],
                g_vec[k] * scale,
                m_vec[k],
                v_vec[k],
                hyper,
                beta1,
                beta2,
                eps,
                weight_decay,
            )
        store(params, i, p_vec)
        store(m, i, m_vec)
        store(v, i, v_vec)
        if has_copy:
            store_half(copy, i, p_vec)
    else:
        for j in range(i, N):
            p, m[j], v[j] = adamw(
                params[j], grads[j] * scale, m[j], v[j], hyper, beta1, beta2, eps, weight_decay
            )
            params[j] = p
            if has_copy:
                copy[j] = uint16(pack_bf16(p, float32(0)))


def adamw_update(
    params,
    grads,
    m,
    v,
    hyper,
    grad_scale,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    copy=None,
) -> None:
    """One step of AdamW on one tensor, in place.

    params, grads, m, v  flat float32 of one length, each starting on a 16-byte boundary
    hyper                (3,) float32: learning_rate, 1 - beta1^t, 1 - beta2^t
    grad_scale           (1,) float32: factor of the gradient; negative: nothing is written
    copy                 None, or uint16 of that length, starting on a 16-byte boundary: the new
                         params rounded to bf16

    Raises ValueError where sizes or addresses are others, TypeError for another type.
    """
    N = params.size
    if copy is None:
        copy = params
    elif copy.dtype != np.uint16:  # the kernel takes float32, for no copy
        raise TypeError(f"adamw_update: copy is of {copy.dtype}; expected uint16, which holds bf16")
    check_sizes("adamw_update", grads=(grads, N), m=(m, N), v=(v, N), copy=(copy, N))
    check_sizes("adamw_update", hyper=(hyper, 3), grad_scale=(grad_scale, 1))
    check_vectors("adamw_update", 0, params=params, grads=grads, m=m, v=v, copy=copy)
    adamw_kernel[ceil_div(N, BLOCK * 4), BLOCK](
        params,
        grads,
        m,
        v,
        copy,
        hyper,
        grad_scale,
        beta1,
        beta2,
        eps,
        weight_decay,
        N,
    )


def adamw_update_reference(
    params: np.ndarray,
    grads: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    hyper: np.ndarray,
    grad_scale: np.ndarray,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    copy: np.ndarray | None = None,
) -> None:
    """The same with NumPy, in any float type."""
    scale = float(grad_scale[0])
    if scale < 0:
        return
    learning_rate, beta1_correction, beta2_correction = (float(h) for h in hyper)
    scratch = np.empty((2, min(CHUNK, params.size)), params.dtype)
    for start in range(0, params.size, CHUNK):
        piece = slice(start, start + CHUNK)
        p, g, m_, v_ = params[piece], grads[piece], m[piece], v[piece]
        step, other = scratch[:, : p.size]

        # m = g + beta1 (m - g), the lerp in place
        np.multiply(g, scale, out=step)
        m_ -= step
        m_ *= beta1
        m_ += step

        np.multiply(step, step, out=other)
        v_ -= other
        v_ *= beta2
        v_ += other

        # step = learning_rate m_hat / (sqrt(v_hat) + eps)
        np.multiply(v_, 1 / beta2_correction, out=other)
        np.sqrt(other, out=other)
        other += eps
        np.multiply(m_, learning_rate / beta1_correction, out=step)
        step /= other

        p *= 1 - learning_rate * weight_decay
        p -= step
        if copy is not None:
            copy[piece] = float32_to_bf16(p)
