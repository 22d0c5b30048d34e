"""What a training run is told, completed: its first weights, the flags left open, the summary.

`options` are train.py's flags, whose names are used here as they are there.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from numbagpt.checkpoint import holds_model, load_model, locate_model
from numbagpt.config import DEFAULT_MODEL, PRESETS, GPT2Config
from numbagpt.corpus import default_corpus
from numbagpt.errors import UserError
from numbagpt.files import exists
from numbagpt.init import random_parameters
from numbagpt.loader import TokenLoader
from numbagpt.memory import MemoryPlan, num_parameters
from numbagpt.schedule import learning_rate_at
from numbagpt.words import counted

# The longest warm-up of a run that is not told one, in steps: that of llm.c's runs of 20,000 steps.
# Short runs need a large part of themselves: 500 steps of d12 on tinyshakespeare end 0.3 nats lower
# with 100 steps of it than with 25.
MAX_WARMUP = 700


def find_model(
    model: str | None, seed: int, output_dir: str
) -> tuple[GPT2Config, Path | None, Callable[[], dict[str, np.ndarray]]]:
    """The model that --model names: its shape, where its weights lie, and what gives them.

    model   None if there is no --model: the default, a preset

    The weights of a preset are random: they lie nowhere.
    Raises UserError if there is no such model, or a preset's name is that of a model here too.
    """
    if model in PRESETS:
        _check_name(model, output_dir)
    preset = DEFAULT_MODEL if model is None else model
    if preset in PRESETS:
        return PRESETS[preset], None, lambda: random_parameters(PRESETS[preset], seed)
    if not exists(model):
        raise UserError(
            f"--model {model}: no such file or folder, and no preset; expected a model .bin, a "
            f"Hugging Face folder, a run's output folder or one of {', '.join(PRESETS)}"
        )
    path = locate_model(model)
    config, parameters = load_model(path)
    return config, path, lambda: parameters


def _check_name(preset: str, output_dir: str) -> None:
    """Raise UserError if what was asked for by the name of a preset may be a model here."""
    # a run may well write to a folder that has its preset's name
    if not holds_model(preset) or os.path.samefile(preset, output_dir):
        return
    others = (name for name in PRESETS if name != preset and PRESETS[name] == PRESETS[preset])
    other = next((f"--model {name}" for name in others), "no --model")  # only the default has none
    raise UserError(
        f"--model {preset} is a preset, random weights, and {preset} here is a model too; write "
        f"--model ./{preset} for that one and {other} for the preset, or rename it"
    )


def fill_in_defaults(options: argparse.Namespace, config: GPT2Config, on_gpu: bool) -> None:
    """Set what depends on model and device, and check what depends on other flags.

    Adds accumulation_steps, the batches whose gradients add up to one step.
    Raises UserError for a sequence or a total batch that model and batch do not allow.
    """

    def default(name: str, value: object) -> None:
        if getattr(options, name) is None:
            setattr(options, name, value)

    default("model", DEFAULT_MODEL)
    default("sequence_length", min(config.max_seq_len, 1024 if on_gpu else 64))
    T = options.sequence_length
    if T > config.max_seq_len:
        raise UserError(
            f"--sequence_length {T} is longer than the model's longest context; "
            f"expected at most {config.max_seq_len}"
        )
    default("batch_size", max(1, (4096 if on_gpu else 512) // T))
    default("total_batch_size", options.batch_size * T)
    options.accumulation_steps = count_batches(options.total_batch_size, options.batch_size, T)
    default("num_iterations", 1000 if on_gpu else 100)
    default("learning_rate", 2e-3 if options.model == DEFAULT_MODEL else 3e-4)
    default("warmup_iters", min(options.num_iterations // 5, MAX_WARMUP))
    if options.input_bin is None:
        options.input_bin, corpus_val_bin = map(str, default_corpus())
        default("input_val_bin", corpus_val_bin)


def count_batches(total: int, B: int, T: int) -> int:
    """total / (B*T). Raises UserError, proposing the nearest valid totals, if that is not whole."""
    count, rest = divmod(total, B * T)
    if rest:
        nearest = f"{count * B * T} or {(count + 1) * B * T}" if count else f"{B * T}"
        raise UserError(
            f"--total_batch_size {total} is no multiple of B*T = {B}*{T} = {B * T}; use {nearest}"
        )
    return count


def summary(
    options: argparse.Namespace,
    config: GPT2Config,
    source: Path | None,
    plan: MemoryPlan,
    processor: str,
    loader: TokenLoader,
    val_loader: TokenLoader | None,
) -> str:
    """What is going to happen, for people to check before it takes hours."""
    o, c, B, T = options, config, options.batch_size, options.sequence_length
    weights = f"weights from {source}" if source else "random weights"
    # what is too short for a batch, or left over by one, is never read
    epochs = f"{o.num_iterations * o.accumulation_steps / loader.num_batches:.2f} epochs"
    if o.overfit_single_batch:
        epochs = "all on the first batch"
    validation = "none"
    if val_loader:
        used = min(o.val_max_steps, val_loader.num_batches)
        validation = (
            f"{o.input_val_bin}: {counted(val_loader.num_tokens, 'token')}, {used:,} of "
            f"{counted(val_loader.num_batches, 'batch', 'batches')}"
        )
    return f"""\
device      {processor}, {o.precision}, {plan.attention} attention
model       {o.model}: L={c.num_layers} NH={c.num_heads} C={c.channels} V={c.vocab_size}, \
{num_parameters(c) / 1e6:,.1f}M parameters, {weights}
data        {o.input_bin}: {counted(loader.num_tokens, "token")}, \
{counted(len(loader.paths), "shard")}, {counted(loader.num_batches, "batch", "batches")}
validation  {validation}
batch       B={B} x T={T} x {o.accumulation_steps} = {counted(o.total_batch_size, "token")} a step
steps       {o.num_iterations:,}, {epochs}
AdamW       {_schedule(o)}; weight decay {o.weight_decay:g}
seed        {o.seed}
{plan}"""


def _schedule(o: argparse.Namespace) -> str:
    """What becomes of the learning rate, in words."""
    N, peak, decay_frac = o.num_iterations, o.learning_rate, o.learning_rate_decay_frac
    rise = f"learning rate {peak:g}, warm-up {counted(o.warmup_iters, 'step')}"
    if o.warmup_iters < N:
        return f"{rise}, then down to {peak * decay_frac:g}"
    last = learning_rate_at(N - 1, peak, o.warmup_iters, N, decay_frac)
    return f"{rise}, in which the run ends, at {last:g}"
