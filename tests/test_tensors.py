"""Flat buffers: which bytes belong to which tensors."""

import numpy as np

from numbagpt.config import GPT2Config
from numbagpt.gpt2 import MATMUL_WEIGHTS
from numbagpt.tensors import FlatTensors, layout_bytes, parameter_layout


def test_runs_cover_their_tensors_and_nothing_else() -> None:
    # 3 layers of 12 channels: no tensor but lies beside a gap
    config = GPT2Config(max_seq_len=5, vocab_size=7, num_layers=3, num_heads=1, channels=12)
    layout = parameter_layout(config)
    buffer = np.zeros(layout_bytes(layout, dense=True), np.uint8)
    tensors = FlatTensors(layout, buffer, config.num_layers, dense=True)
    for name in layout:
        tensors[name].fill(1)
    names = [name for name in layout if name not in MATMUL_WEIGHTS]
    # wpe ln1w ln1b, qkvb, attprojb ln2w ln2b, fcb, fcprojb lnfw lnfb
    runs = tensors.runs(reversed(names))
    assert len(runs) == 5
    for part in runs:
        part.fill(0)
    for name in layout:
        np.testing.assert_array_equal(tensors[name], float(name in MATMUL_WEIGHTS))
