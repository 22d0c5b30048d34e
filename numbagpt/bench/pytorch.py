"""The peer: the same training step, and the same operations, in PyTorch as fast as it goes.

GPT-2 under torch.compile, bf16 by autocast or TF32, cuDNN's attention, fused AdamW, gradient
clipping. Only the benchmarks need it, and only where PyTorch is installed.
"""

import contextlib
import functools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from numbagpt.bench.cases import ADAMW_PARAMETERS
from numbagpt.bench.timing import STEPS, WARMUP, buffer_sets, measure
from numbagpt.config import GPT2Config


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        C = config.channels
        self.NH = config.num_heads
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.NH, C // self.NH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with a tied head; returns the mean cross-entropy."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        C, Vp = config.channels, config.padded_vocab_size
        self.wte, self.wpe = nn.Embedding(Vp, C), nn.Embedding(config.max_seq_len, C)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.lnf = nn.LayerNorm(C)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.size(1), device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def step_seconds(config: GPT2Config, B: int, T: int, precision: str) -> tuple[float, float] | None:
    """Median seconds of a training step and its peak memory in bytes; None if it does not fit."""
    found = measure(partial(_step_seconds, config, B, T, precision))
    torch._dynamo.reset()
    torch.cuda.empty_cache()  # what PyTorch keeps for later is the next measurement's
    return found


def _set_precision(precision: str) -> None:
    """Whether PyTorch multiplies float32 in TF32 from now on."""
    torch.set_float32_matmul_precision("high" if precision != "fp32" else "highest")


def _step_seconds(config: GPT2Config, B: int, T: int, precision: str) -> tuple[float, float]:
    torch.cuda.reset_peak_memory_stats()
    _set_precision(precision)
    model = GPT2(config).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-4), fused=True, weight_decay=0.1
    )
    shape = (B, T)
    inputs, targets = (torch.randint(0, config.vocab_size, shape, device="cuda") for _ in range(2))
    # below some 16 sequences the host cannot keep up with the GPU, and CUDA graphs help
    graphs = B * T <= 8192

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        backend = contextlib.nullcontext()
        if precision == "bf16":
            backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"), backend:
            return model(inputs, targets)

    compiled = torch.compile(loss, mode="reduce-overhead" if graphs else None)

    def step() -> None:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        compiled(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARMUP + STEPS + 1)]
    for event in events:
        step()
        event.record()
    torch.cuda.synchronize()
    pairs = zip(events[WARMUP:], events[WARMUP + 1 :], strict=False)
    seconds = float(np.median([a.elapsed_time(b) for a, b in pairs])) * 1e-3
    return seconds, float(torch.cuda.max_memory_allocated())


def _elapsed(function: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3


def operation_seconds(make_call: Callable[[], Callable[[], object]], nbytes: int) -> float | None:
    """Median seconds of an operation, measured as bench.timing does: in a CUDA graph, over more
    buffers than the L2 cache holds. make_call makes one set of buffers of `nbytes`; None if they do
    not fit."""
    found = measure(partial(_operation_seconds, make_call, nbytes))
    torch.cuda.empty_cache()
    return found


def _operation_seconds(make_call: Callable[[], Callable[[], object]], nbytes: int) -> float:
    side = torch.cuda.Stream()
    # a backward pass runs on the stream of its forward pass, which must be the captured one
    with torch.cuda.stream(side):
        calls = [make_call() for _ in range(buffer_sets(nbytes))]
        for call in calls:
            call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
    graph.replay()
    return float(np.median([_elapsed(graph.replay) for _ in range(11)])) / len(calls)


def operations(
    config: GPT2Config, B: int, T: int, storage: type, precision: str
) -> dict[str, Callable]:
    """Name of one of our operations → make_call of PyTorch's own, where it has it."""
    _set_precision(precision)
    C, NH, Vp, N = config.channels, config.num_heads, config.padded_vocab_size, B * T
    dtype = torch.bfloat16 if storage == np.uint16 else torch.float32

    @functools.cache
    def tokens() -> torch.Tensor:
        return torch.randint(0, config.vocab_size, (B, T), device="cuda")

    def x(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)

    def call(function: Callable, *shapes: tuple[int, ...]) -> Callable:
        def make_call() -> Callable[[], object]:
            arguments = [x(*shape) for shape in shapes]
            return lambda: function(*arguments)

        return make_call

    def gradient(function: Callable, *shapes: tuple[int, ...]) -> Callable:
        def make_call() -> Callable[[], object]:
            arguments = [x(*shape, grad=True) for shape in shapes]
            out = function(*arguments)
            dout = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, arguments, dout, retain_graph=True)

        return make_call

    def encoder(wte: torch.Tensor, wpe: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens(), wte) + wpe

    def split_heads(qkv: torch.Tensor) -> torch.Tensor:
        return qkv.view(B, T, 3, NH, C // NH).permute(2, 0, 3, 1, 4)

    def attention(qkv: torch.Tensor) -> torch.Tensor:
        backends = [SDPBackend.CUDNN_ATTENTION] if dtype == torch.bfloat16 else []
        backends += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(*split_heads(qkv), is_causal=True)

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def gelu_of_sum(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gelu(x + bias)

    def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (C,), weight, bias)

    def classifier() -> Callable[[], object]:
        logits, targets = x(N, Vp, grad=True), tokens().view(-1)
        return lambda: torch.autograd.grad(F.cross_entropy(logits, targets), logits)

    def adamw() -> Callable[[], object]:
        parameter = torch.randn(ADAMW_PARAMETERS, device="cuda", requires_grad=True)
        parameter.grad = torch.randn_like(parameter)
        return torch.optim.AdamW([parameter], fused=True, capturable=True).step

    rows, wide = (B, T, C), (N, 4 * C)
    found = {
        "encoder_forward": call(encoder, (Vp, C), (T, C)),
        "encoder_backward": gradient(encoder, (Vp, C), (T, C)),
        "layernorm_forward": call(layernorm, rows, (C,), (C,)),
        "layernorm_backward": gradient(layernorm, rows, (C,), (C,)),
        "residual_forward": call(torch.add, rows, rows),
        "gelu_forward": call(gelu, wide),
        "gelu_backward": gradient(gelu_of_sum, wide, (4 * C,)),
        "matmul_backward_bias": call(lambda dout: dout.sum(0), wide),
        "flash_attention_forward": call(attention, (B, T, 3 * C)),
        "flash_attention_backward": gradient(attention, (B, T, 3 * C)),
        "permute": call(lambda qkv: split_heads(qkv).contiguous(), (B, T, 3 * C)),
        "unpermute": call(lambda y: y.transpose(1, 2).contiguous(), (B, NH, T, C // NH)),
        "fused_classifier": classifier,
        "adamw_update": adamw,
        "global_norm": lambda: partial(
            torch.linalg.vector_norm, torch.randn(ADAMW_PARAMETERS, device="cuda")
        ),
    }
    for name, K, OC in (
        ("qkv", C, 3 * C),
        ("attproj", C, C),
        ("fc", C, 4 * C),
        ("fcproj", 4 * C, C),
        ("lm-head", C, Vp),
    ):
        bias = [] if name == "lm-head" else [(OC,)]
        found[f"matmul_forward {name}"] = call(F.linear, (N, K), (OC, K), *bias)
        found[f"matmul dX {name}"] = call(torch.matmul, (N, OC), (OC, K))
        found[f"matmul dW {name}"] = call(lambda dout, inp: dout.t() @ inp, (N, OC), (N, K))
    return found
