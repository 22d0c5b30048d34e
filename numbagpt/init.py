"""Random weights: GPT-2's initialisation (Radford et al., 2019, section 2.3).

    wte, wpe, every weight matrix      normal(0, 0.02)
    attprojw, fcprojw                  normal(0, 0.02 / sqrt(2L))
    biases                             0
    layernorm weights                  1

The residual stream is a sum of 2L branches, each ending in attprojw or fcprojw. Variances of a sum
add up, so dividing these two by sqrt(2L) keeps the stream's size the same whatever the depth.
"""

import math

import numpy as np

from numbagpt.config import GPT2Config
from numbagpt.errors import UserError
from numbagpt.tensors import parameter_shapes

STD = 0.02
RESIDUAL_PROJECTIONS = {"attprojw", "fcprojw"}
LAYERNORM_WEIGHTS = {"ln1w", "ln2w", "lnfw"}


def random_parameters(config: GPT2Config, seed: int) -> dict[str, np.ndarray]:
    """The 16 tensors of `parameter_shapes(config)`, float32; rows of wte from V on are zero.

    seed   any integer from 0 up. Each tensor draws from its own stream (PCG64, spawned from the
           seed), so that a tensor's numbers depend on no other tensor.

    Raises UserError if the seed is negative.
    """
    if seed < 0:
        raise UserError(f"the seed is {seed}; expected 0 or more")
    shapes = parameter_shapes(config)
    streams = np.random.SeedSequence(seed).spawn(len(shapes))
    parameters = {}
    for (name, shape), stream in zip(shapes.items(), streams, strict=True):
        array = np.zeros(shape, np.float32)
        if name in LAYERNORM_WEIGHTS:
            array[:] = 1
        elif name.endswith("w") or name in ("wte", "wpe"):
            drawn = array[: config.vocab_size] if name == "wte" else array
            np.random.Generator(np.random.PCG64(stream)).standard_normal(
                dtype=np.float32, out=drawn
            )
            depth = 2 * config.num_layers if name in RESIDUAL_PROJECTIONS else 1
            drawn *= np.float32(STD / math.sqrt(depth))
        parameters[name] = array
    return parameters
