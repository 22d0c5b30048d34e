"""What a test looks into shards with."""

import os

import numpy as np

from numbagpt.shards import count_tokens, read_tokens


def read_shard(path: str | os.PathLike) -> np.ndarray:
    """All tokens of a shard, (n,) uint16."""
    return read_tokens(path, 0, count_tokens(path))
