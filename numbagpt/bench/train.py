"""The whole training step: ms, tokens per second, MFU and memory, next to PyTorch's."""

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from numbagpt import metrics
from numbagpt.bench.timing import DOES_NOT_FIT, STEPS, WARMUP, interval_seconds, measure
from numbagpt.config import GPT2Config
from numbagpt.device import select_device
from numbagpt.gpt2 import GPT2
from numbagpt.gpu.runtime import gpu_info
from numbagpt.init import random_parameters
from numbagpt.memory import MIB, num_parameters
from numbagpt.training import Trainer


def step_seconds(
    config: GPT2Config, B: int, T: int, precision: str, **options
) -> tuple[float, int, float]:
    """Of a step (forward, backward, clipping, AdamW) on random tokens: median GPU seconds, bytes of
    the model's buffers and median host seconds, those its CPU worked to queue the step.

    options: attention and recompute, as GPT2 takes them.
    """
    model = GPT2(config, select_device("cuda")[0], B, T, precision, **options)
    model.load_parameters(random_parameters(config, 1))
    trainer = Trainer(model, weight_decay=0.1)
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(0, config.vocab_size, (2, B, T), dtype=np.int32)
    batch = trainer.pack(inputs, targets)
    host_times = []

    def step() -> None:
        start = time.thread_time()
        trainer.step([batch], 1e-4)
        host_times.append(time.thread_time() - start)
        list(trainer.read(in_flight=1))

    gpu = interval_seconds(step, WARMUP, STEPS)
    list(trainer.read())
    return gpu, model.plan.total, float(np.median(host_times[WARMUP:]))


def report(
    config: GPT2Config, batch_sizes: list[int], T: int, precision: str, peer: bool, **options
) -> Iterator[str]:
    """One line for each batch size, and with `peer` one of PyTorch's step in the same run."""
    name = gpu_info().name
    yield f"{name}, {precision}, T={T}, {num_parameters(config) / 1e6:.0f}M parameters"
    peak = metrics.peak_flops(name, precision)
    flops = metrics.flops_per_token(num_parameters(config), config.num_layers, config.channels, T)

    def line(what: str, B: int, measured: tuple[float, ...] | None) -> str:
        """measured: seconds, bytes, …"""
        if measured is None:
            return f"B={B:3d} {what:9} {DOES_NOT_FIT}"
        seconds, nbytes, *_ = measured
        tokens = B * T / seconds
        mfu = metrics.format_mfu(tokens * flops, peak)
        return (
            f"B={B:3d} {what:9} {seconds * 1e3:8.2f} ms  {tokens / 1e3:7.1f}K tok/s  {mfu}  "
            f"{nbytes / MIB:8,.0f} MiB"
        )

    for B in batch_sizes:
        ours = measure(partial(step_seconds, config, B, T, precision, **options))
        yield line("numbagpt", B, ours) + (f"  host {ours[2] * 1e3:.2f} ms" if ours else "")
        if peer:
            from numbagpt.bench import pytorch

            theirs = pytorch.step_seconds(config, B, T, precision)
            ratio = f"  {theirs[0] / ours[0]:.2f}x ours" if ours and theirs else ""
            yield line("PyTorch", B, theirs) + ratio
