"""GELU, the activation between the two matrices of the MLP, in its tanh form.

    gelu(x) = x/2 (1 + tanh u),   u = √(2/π) (x + 0.044715 x³)

Hendrycks & Gimpel, "Gaussian Error Linear Units" (2016). GPT-2 was trained with this form, which
differs from the exact x Φ(x) by up to 5e-4. Its derivative, with sech² u = 1 - tanh² u:

    gelu'(x) = (1 + tanh u)/2 + x/2 (1 - tanh² u) u',   u' = √(2/π) (1 + 3 · 0.044715 x²)

The kernels use neither tanh nor cosh. (1 + tanh u)/2 is the logistic function of 2u,

    s = 1 / (1 + exp(-2u)),   gelu(x) = x s,   gelu'(x) = s + 2 x s (1 - s) u'

since 1 - tanh² u = (1 + tanh u)(1 - tanh u) = 4 s (1 - s). That is one exponential and one
reciprocal, each a single instruction of the GPU's special function units, and s keeps its relative
precision where tanh u is close to -1 and 1 + tanh u would cancel. The GPU does have a tanh
instruction, but of 11 bits only. Its exponential is to base 2, so log2(e) is multiplied into the
constants beforehand: in bf16, with 4 bytes to move for a value, every instruction counts, and
math.exp takes seven more than exp2.
"""

import math

import numpy as np
from numba import cuda, float32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.ptx import exp2, reciprocal
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

BLOCK = 256
SCALE = math.sqrt(2 / math.pi)
CUBE = 0.044715

# exp(-2u) = 2 ** (x (LINEAR + CUBIC x²)), and -2u' = SLOPE + CURVE x²
LINEAR = np.float32(-2 * SCALE * math.log2(math.e))
CUBIC = np.float32(-2 * SCALE * CUBE * math.log2(math.e))
SLOPE = np.float32(-2 * SCALE)
CURVE = np.float32(-2 * SCALE * 3 * CUBE)
# 2 ** 115 is 4e34: s is zero to float32's precision, and exp2 cannot overflow to infinity.
LARGEST = np.float32(115)


def _tanh_u(x: np.ndarray) -> np.ndarray:
    """tanh u, as a new array."""
    t = np.multiply(x, x)
    t *= CUBE
    t += 1
    t *= x
    t *= SCALE
    return np.tanh(t, out=t)


def gelu_forward_reference(out: np.ndarray, inp: np.ndarray) -> None:
    """What gelu_forward computes, in NumPy and in the arrays' own precision."""
    t = _tanh_u(inp)
    t += 1
    t *= inp
    np.multiply(t, 0.5, out=out)


def gelu_backward_reference(dinp: np.ndarray, inp: np.ndarray, dout: np.ndarray) -> None:
    """What gelu_backward computes, in NumPy and in the arrays' own precision."""
    t = _tanh_u(inp)
    slope = np.multiply(inp, inp)  # becomes x (1 - tanh² u) u'
    slope *= 3 * CUBE * SCALE
    slope += SCALE
    slope *= inp
    slope *= 1 - t * t
    slope += t
    slope += 1
    slope *= 0.5
    np.multiply(slope, dout, out=dinp)


@device_function
def logistic(x, square):
    """s = (1 + tanh u)/2 of x; square is x²."""
    exponent = min(x * (LINEAR + CUBIC * square), LARGEST)
    return reciprocal(float32(1) + exp2(exponent))


@kernel(
    void(float32[::1], float32[::1], int64),
    void(uint16[::1], uint16[::1], int64),
    max_threads=BLOCK,
)
def gelu_forward_kernel(out, inp, N):
    """out[i] = x s, x = inp[i].

    One thread per 16 bytes. Moves two arrays: 8 N bytes in float32.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    i = cuda.grid(1) * width(out)
    if i < N:
        load(x, inp, i)
        for k in range(width(out)):
            x[k] *= logistic(x[k], x[k] * x[k])
        store(out, i, x)


@kernel(
    void(float32[::1], float32[::1], float32[::1], int64),
    void(uint16[::1], uint16[::1], uint16[::1], int64),
    max_threads=BLOCK,
)
def gelu_backward_kernel(dinp, inp, dout, N):
    """dinp[i] = dout[i] (s + 2 x s (1 - s) u'), x = inp[i].

    One thread per 16 bytes. Moves three arrays: 12 N bytes in float32.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    d = cuda.local.array(MAX_WIDTH, float32)
    i = cuda.grid(1) * width(dinp)
    if i < N:
        load(x, inp, i)
        load(d, dout, i)
        for k in range(width(dinp)):
            square = x[k] * x[k]
            s = logistic(x[k], square)
            minus_2du = SLOPE + CURVE * square
            d[k] *= s - x[k] * s * (float32(1) - s) * minus_2du
        store(dinp, i, d)


def gelu_forward(out, inp) -> None:
    """out = gelu(inp).

    out, inp  one shape, float32 or bf16 bits; a multiple of 16 bytes each. out may be inp.
    """
    vectors = out.size * out.dtype.itemsize // 16
    gelu_forward_kernel[ceil_div(vectors, BLOCK), BLOCK](out, inp, out.size)


def gelu_backward(dinp, inp, dout) -> None:
    """dinp = gelu'(inp) dout.

    dinp, inp, dout  one shape, float32 or bf16 bits; a multiple of 16 bytes each. inp is the
                     input of the forward pass. dinp may be dout, which it then overwrites.
    """
    vectors = dinp.size * dinp.dtype.itemsize // 16
    gelu_backward_kernel[ceil_div(vectors, BLOCK), BLOCK](dinp, inp, dout, dinp.size)
