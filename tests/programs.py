"""What the tests of train.py and sample.py share: tiny models and data, and a way to run them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from numbagpt.checkpoint import write_model
from numbagpt.config import GPT2Config
from numbagpt.init import random_parameters
from numbagpt.shards import write_shard

ROOT = Path(__file__).parents[1]

SMALL_VOCAB = GPT2Config(max_seq_len=32, vocab_size=60, num_layers=1, num_heads=2, channels=8)
FULL_VOCAB = GPT2Config(max_seq_len=32, num_layers=1, num_heads=2, channels=16)


def make_model_file(path: Path, config: GPT2Config, scale: float = 1.0) -> Path:
    """Write a model with random weights, times `scale`."""
    parameters = random_parameters(config, 1)
    write_model(path, config, {name: scale * array for name, array in parameters.items()})
    return path


def make_shard(path: Path, num_tokens: int, vocab_size: int, seed: int = 1) -> Path:
    """Write a shard of random tokens."""
    write_shard(path, np.random.default_rng(seed).integers(0, vocab_size, num_tokens))
    return path


def checkpoints(folder: Path) -> list[str]:
    """The names of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def command(program: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / program), *map(str, arguments)]


def run(program: str, *arguments: object, cwd: Path, **options) -> subprocess.CompletedProcess:
    """Run a program as a user with no GPU does, with its output captured as text."""
    # One BLAS thread: where tests run side by side, several wait for each other and lose.
    environment = {"NUMBA_DISABLE_CUDA": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command(program, *arguments),
        cwd=cwd,
        env=os.environ | environment,
        text=True,
        timeout=600,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )
