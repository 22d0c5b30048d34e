"""The whole training step: ms, tokens per second, MFU and memory."""

from collections.abc import Iterator

import numpy as np

from numbagpt import metrics
from numbagpt.bench.timing import elapsed_seconds
from numbagpt.config import GPT2Config
from numbagpt.device import select_device
from numbagpt.gpt2 import GPT2, pack_batch
from numbagpt.gpu.runtime import gpu_info
from numbagpt.init import random_parameters
from numbagpt.memory import MIB, num_parameters
from numbagpt.training import Trainer

WARMUP, STEPS = 5, 15


def step_seconds(config: GPT2Config, B: int, T: int, precision: str) -> tuple[float, GPT2]:
    """Median GPU time of a step (forward, backward, clipping, AdamW) on random tokens."""
    model = GPT2(config, select_device("cuda")[0], B, T, precision)
    model.load_parameters(random_parameters(config, 1))
    trainer = Trainer(model, weight_decay=0.1)
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(0, config.vocab_size, (2, B, T), dtype=np.int32)
    batch = pack_batch(inputs, targets)
    times = []
    for step in range(WARMUP + STEPS):
        seconds = elapsed_seconds(lambda: trainer.step([batch], 1e-4))
        list(trainer.read())
        if step >= WARMUP:
            times.append(seconds)
    return float(np.median(times)), model


def report(config: GPT2Config, batch_sizes: list[int], T: int, precision: str) -> Iterator[str]:
    """One line for each batch size."""
    name = gpu_info().name
    yield f"{name}, {precision}, T={T}, {num_parameters(config) / 1e6:.0f}M parameters"
    for B in batch_sizes:
        seconds, model = step_seconds(config, B, T, precision)
        tokens = B * T / seconds
        flops = metrics.flops_per_token(
            num_parameters(config), config.num_layers, config.channels, T
        )
        peak = metrics.peak_flops(name, precision)
        mfu = f"{tokens * flops / peak:.1%}" if peak else "n/a"
        yield (
            f"B={B:3d}: {seconds * 1e3:8.2f} ms  {tokens / 1e3:7.1f}K tok/s  MFU {mfu}  "
            f"{model.plan.total / MIB:,.0f} MiB"
        )
        del model
