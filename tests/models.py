"""Tiny models and batches for the tests of everything above single operations."""

import numpy as np

from numbagpt.config import GPT2Config
from numbagpt.device import Device, HostDevice
from numbagpt.gpt2 import GPT2
from numbagpt.init import random_parameters
from numbagpt.state import pack_batch

# Odd on purpose: three heads of size 12, a vocabulary that is not its padded self.
TINY = GPT2Config(max_seq_len=64, vocab_size=91, num_layers=2, num_heads=3, channels=36)


def random_batch(config: GPT2Config, B: int, T: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random (inputs, targets), each (B, T) int32."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (2, B, T), dtype=np.int32)
    return tokens[0], tokens[1]


def packed_batches(config: GPT2Config, B: int, T: int, seeds: range) -> list[np.ndarray]:
    """Packed random batches, one per seed."""
    return [pack_batch(*random_batch(config, B, T, seed)) for seed in seeds]


def scaled_parameters(config: GPT2Config, seed: int) -> dict[str, np.ndarray]:
    """Random parameters, none of them zero or one: a gradient that goes missing shows."""
    rng = np.random.default_rng(seed)
    parameters = random_parameters(config, seed)
    for name, values in parameters.items():
        if values.ndim < 3 and name not in ("wte", "wpe"):
            values += rng.normal(0, 0.1, values.shape).astype(np.float32)
        else:
            values *= np.float32(3)
    return parameters


def make_model(
    config: GPT2Config, B: int, T: int, device: Device | None = None, seed: int = 1, **options
) -> GPT2:
    """A model with scaled random parameters, on the CPU unless told otherwise."""
    model = GPT2(config, device or HostDevice("cpu"), B, T, **options)
    model.load_parameters(scaled_parameters(config, seed))
    return model


def loss_and_gradients(model: GPT2, batch: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and all 16 gradients of one packed batch."""
    model.zero_grad()
    model.set_batch(batch)
    model.forward()
    model.backward()
    return float(model.device.to_host(model.mean_loss)[0]), model.gradients()
