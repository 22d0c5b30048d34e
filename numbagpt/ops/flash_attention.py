"""Causal self-attention without the (T, T) matrix (Dao et al., FlashAttention, 2022; Dao,
FlashAttention-2, 2023).

Per sequence and head, with q, k, v (T, HS), scale = 1 / sqrt(HS) and the sums over t2 <= t:

    S   = scale q k^T                 lse = log of the sum of exp(S) over a row
    P   = exp(S - lse)                out = P v

attention.py writes S and P to memory: for T = 1024 and HS = 64 each is 16 times as long as q. Here
a block takes a tile of 64 queries and goes through the keys tile by tile. The scores of a tile stay
in the block's registers. The softmax then has to begin before the sum of its row is known.

Online softmax
--------------
exp overflows, so a softmax first subtracts the largest score of the row. That is known only at the
end of the row. The largest so far will do, if the sums are corrected whenever it grows. For a row,
over tiles j of keys, with m the maximum so far and l the sum so far:

    m'  = max(m, max S_j)
    l   = l * exp(m - m') + sum exp(S_j - m')
    out = out * exp(m - m') + exp(S_j - m') v_j
    m   = m'

At the end out / l is the result of the attention, and m + log(l) is lse. From lse the backward pass
computes P again.

Backward
--------
From the gradient dout, with one number for each row, delta = sum of dout * out over the row:

    dP = dout v^T         dS = scale P * (dP - delta)
    dv = P^T dout         dq = dS k         dk = dS^T q

(delta is the sum over a row of P * dP, since out = P v.) P and dP are computed tile by tile again.
That is more arithmetic than loading them, and still several times as fast.

Two kernels share the work. The first computes dq; on the way it computes delta, and leaves lse and
delta in scratch. The second reads them there and computes dk and dv.

Gradient of the bias
--------------------
The gradient of a bias that was added to q, k and v is the sum of dq, dk and dv over all tokens. No
kernel need read these again, and two of the three sums are known without summing dk and dv:

* dq: the block that has computed a tile of dq sums its 64 rows, column by column.
* dv: sum over keys of P^T dout = sum over queries of dout, because each row of P sums to 1. The
  same block has the tile of dout and sums its 64 rows too.
* dk: sum over keys of dS^T q = 0, because each row of dS sums to 0. (The same vector added to all k
  adds the same number to all scores of a query, and the softmax does not change.)

So each tile of 64 tokens leaves one row of 3C sums: tile_sums. Only these rows, one for 64 tokens,
are left to be added up.

Kernels
-------
flash_wgmma.py, flash_wgmma_backward.py     Hopper, bf16
flash_mma.py, flash_mma_backward.py         every GPU of compute capability 8.0 and later, bf16 or
                                            float32, which they multiply as TF32
flash_tile.py                               what both are made of, and a legend of their names

All read q, k and v where the matmul left them, and write out where the next one reads: no
permutation.
"""

import itertools
import math
from types import ModuleType

import numpy as np
from numba import cuda

from numbagpt.errors import UserError
from numbagpt.gpu.kernel import ceil_div
from numbagpt.gpu.ptx import LOG2_E
from numbagpt.ops import flash_mma, flash_mma_backward, flash_wgmma, flash_wgmma_backward
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors
from numbagpt.ops.flash_tile import ROWS, THREADS, tile_grid
from numbagpt.ops.matmul import (
    matmul_backward_bias,
    matmul_backward_bias_reference,
    matmul_backward_bias_scratch,
)

# Forward and backward modules, the faster first.
VARIANTS = {
    "wgmma": (flash_wgmma, flash_wgmma_backward),
    "mma": (flash_mma, flash_mma_backward),
}


def variant_for(
    head_size: int, storage: np.typing.DTypeLike, compute_capability: tuple[int, int]
) -> str | None:
    """The fastest variant that takes this head size and storage on such a GPU; None if none does.

    storage: uint16, which stands for bf16, or float32.
    """
    key = head_size, np.dtype(storage).itemsize
    for name, (forward, _) in VARIANTS.items():
        kernel = forward.forward_kernels.get(key)
        if kernel is not None and kernel.runs_on(compute_capability):
            return name
    return None


def supports(
    head_size: int, storage: np.typing.DTypeLike, compute_capability: tuple[int, int]
) -> bool:
    """Whether there is a variant for this head size, storage and GPU."""
    return variant_for(head_size, storage, compute_capability) is not None


def flash_attention_scratch(B: int, T: int, C: int, NH: int) -> int:
    """float32 elements that flash_attention_backward needs as scratch."""
    return sum(_scratch_parts(B, T, C, NH))


def _scratch_parts(B: int, T: int, C: int, NH: int) -> tuple[int, int, int]:
    """Elements of the three parts of the scratch.

    tile_sums     (B * tiles, 3C)   what each tile of 64 tokens adds to the gradient of the bias
    bias_scratch  of matmul_backward_bias, which adds up tile_sums
    lse_delta     (B, NH, 2, T)     lse * log2(e), and delta, of every query. lse comes here once
                                    more because the dkv kernel copies it straight into shared
                                    memory, where it has to be multiplied already
    """
    tiles = B * ceil_div(T, ROWS)
    return tiles * 3 * C, matmul_backward_bias_scratch(tiles, 3 * C), 2 * B * NH * T


def flash_attention_forward(out, lse, qkv, variant: str | None = None) -> None:
    """Attention of every head to the tokens up to its own.

    out   (B, T, C)        written; C = NH * HS
    lse   (B, NH, T)       written, float32: log of the sum of exp(scaled scores) of each query
    qkv   (B, T, 3C)       q, k and v of all heads: (B, T, 3, NH, HS)

    out and qkv are both bf16 (uint16) or both float32. variant: a key of VARIANTS; by default the
    fastest that the GPU has, and under the simulator "mma".
    Raises UserError where no kernel takes this head size and storage on this GPU; ValueError where
    sizes or addresses do not fit together, or the variant asked for does not take them.
    """
    B, NH, T, HS = _head_shape("flash_attention_forward", out, lse)
    C = NH * HS
    forward, _ = _modules(HS, qkv, variant)
    check_sizes("flash_attention_forward", out=(out, B * T * C), qkv=(qkv, 3 * B * T * C))
    check_vectors("flash_attention_forward", C, out=out, qkv=qkv)
    key = HS, qkv.dtype.itemsize
    _, scale2 = _scales(HS)
    launch = tile_grid(B * NH, ceil_div(T, ROWS)), THREADS, forward.FORWARD_SHARED[key]
    forward.forward_kernels[key][launch](out, lse, qkv, T, NH, scale2)


def flash_attention_backward(
    dqkv, dout, qkv, out, lse, scratch, dqkvb=None, variant: str | None = None
) -> None:
    """Gradient of flash_attention_forward. The same bits at every run.

    dqkv            (B, T, 3C)     written
    dout            (B, T, C)
    qkv, out, lse                  as flash_attention_forward was given and left them
    scratch         float32, at least flash_attention_scratch(B, T, C, NH); overwritten. Starts on a
                    16-byte boundary
    dqkvb           (3C,) or None  float32: += the gradient of the bias that was added to qkv

    Raises as flash_attention_forward does.
    """
    name = "flash_attention_backward"
    B, NH, T, HS = _head_shape(name, out, lse)
    C = NH * HS
    N = B * T * C
    _, backward = _modules(HS, qkv, variant)
    check_sizes(name, dqkv=(dqkv, 3 * N), dout=(dout, N), qkv=(qkv, 3 * N), out=(out, N))
    check_room(name, scratch=(scratch, flash_attention_scratch(B, T, C, NH)))
    check_vectors(name, C, dqkv=dqkv, dout=dout, qkv=qkv, out=out)
    check_vectors(name, 0, scratch=scratch)
    if dqkvb is not None:
        check_sizes(name, dqkvb=(dqkvb, 3 * C))
    key = HS, qkv.dtype.itemsize
    scale, scale2 = _scales(HS)
    tiles = ceil_div(T, ROWS)
    tile_sums, bias_scratch, lse_delta = _split(scratch, _scratch_parts(B, T, C, NH))
    grid = tile_grid(B * NH, tiles)
    with_sums = int(dqkvb is not None)
    # The order matters: the dq kernel writes lse_delta, which the dkv kernel reads, and tile_sums,
    # which matmul_backward_bias reads.
    launch = grid, THREADS, backward.DQ_SHARED[key]
    backward.dq_kernels[key][launch](
        dqkv, tile_sums, lse_delta, dout, qkv, out, lse, T, NH, scale2, scale, with_sums
    )
    launch = grid, THREADS, backward.DKV_SHARED[key]
    backward.dkv_kernels[key][launch](dqkv, dout, qkv, lse_delta, T, NH, scale2, scale)
    if dqkvb is not None:
        matmul_backward_bias(dqkvb, tile_sums.reshape((B * tiles, 3 * C)), bias_scratch)


def _head_shape(operation: str, out, lse) -> tuple[int, int, int, int]:
    """B, NH, T and HS, of which out (B, T, NH * HS) has the last and lse (B, NH, T) the others."""
    B, NH, T = lse.shape
    C = out.shape[-1]
    if C % NH:
        raise ValueError(
            f"{operation}: out has {C} channels; expected a multiple of {NH}, the heads of lse"
        )
    return B, NH, T, C // NH


def _split(scratch, sizes: tuple[int, ...]) -> list:
    """Parts of the scratch of these sizes, one after the other."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [scratch[start:end] for start, end in itertools.pairwise(ends)]


def _scales(HS: int) -> tuple[float, float]:
    """scale = 1 / sqrt(HS) and scale2 = scale * log2(e): exp(scale * x) = 2 ** (scale2 * x)."""
    scale = 1 / math.sqrt(HS)
    return scale, scale * LOG2_E


def _modules(HS: int, array, variant: str | None) -> tuple[ModuleType, ModuleType]:
    """The variant asked for, or the one for the array's GPU or the simulator."""
    if variant is None:
        on_host = isinstance(array, np.ndarray)
        cc = (8, 0) if on_host else cuda.get_current_device().compute_capability
        variant = variant_for(HS, array.dtype, cc)
        if variant is None:
            sizes = ", ".join(
                str(size) for size in sorted({k[0] for k in flash_mma.forward_kernels})
            )
            raise UserError(
                f"no flash attention for head size {HS} on a GPU of compute capability "
                f"{cc[0]}.{cc[1]}; it takes head sizes {sizes} from 8.0 on; "
                "use --attention materialized"
            )
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}; expected one of {', '.join(VARIANTS)}")
    modules = VARIANTS[variant]
    if (HS, array.dtype.itemsize) not in modules[0].forward_kernels:
        raise ValueError(f"variant {variant} has no kernel for head size {HS} in {array.dtype}")
    return modules


def flash_attention_forward_reference(out: np.ndarray, lse: np.ndarray, qkv: np.ndarray) -> None:
    """What flash_attention_forward computes, in NumPy and in the arrays' own precision."""
    q, k, v = _heads(qkv, 3, lse.shape[1])
    scores = _scores(q, k)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    lse[...] = (top + np.log(total))[..., 0]
    weights /= total
    out[...] = (weights @ v).swapaxes(1, 2).reshape(out.shape)


def flash_attention_backward_reference(
    dqkv: np.ndarray,
    dout: np.ndarray,
    qkv: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    scratch: np.ndarray | None,
    dqkvb: np.ndarray | None = None,
) -> None:
    """What flash_attention_backward computes, likewise; scratch is not used."""
    NH = lse.shape[1]
    q, k, v = _heads(qkv, 3, NH)
    (do,), (o,) = _heads(dout, 1, NH), _heads(out, 1, NH)
    dq, dk, dv = _heads(dqkv, 3, NH)
    weights = np.exp(_scores(q, k) - lse[..., None])
    dv[...] = weights.swapaxes(2, 3) @ do
    delta = (do * o).sum(-1, keepdims=True)
    dscores = weights * (do @ v.swapaxes(2, 3) - delta) / math.sqrt(q.shape[-1])
    dq[...] = dscores @ k
    dk[...] = dscores.swapaxes(2, 3) @ q
    if dqkvb is not None:
        matmul_backward_bias_reference(dqkvb, dqkv, None)


def _heads(packed, parts, NH):
    """Views (B, NH, T, HS) of the parts that lie side by side in a row: 3 in qkv, 1 in out."""
    B, T, _ = packed.shape
    return packed.reshape(B, T, parts, NH, -1).transpose(2, 0, 3, 1, 4)


def _scores(q, k):
    """Scaled scores (B, NH, T, T), the lowest number above the diagonal."""
    T = q.shape[2]
    scores = q @ k.swapaxes(2, 3)
    scores /= math.sqrt(q.shape[-1])
    scores[..., np.triu(np.ones((T, T), bool), 1)] = np.finfo(scores.dtype).min
    return scores
