"""Where a test runs: on a GPU if it is marked `gpu`, and nowhere but with a reason why not.

And the fixtures that several files share.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from check import Place
from numba import cuda
from programs import SMALL_VOCAB, make_model_file, make_shard

from numbagpt.gpu import runtime


def pytest_configure() -> None:
    # Where the tests run in a shell's background, Ctrl-C is ignored, also by the programs they
    # start, some of which they interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = runtime.gpu_problem()
    if problem:
        skip = pytest.mark.skip(reason=problem)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this GPU has no instructions for; the simulator has them all."""
    if item.get_closest_marker("gpu") is None:
        return
    if item.get_closest_marker("ampere") and cuda.get_current_device().compute_capability < (8, 0):
        pytest.skip("bf16, TF32 and asynchronous copies came with compute capability 8.0")
    if item.get_closest_marker("hopper") and cuda.get_current_device().compute_capability != (9, 0):
        pytest.skip("wgmma is on Hopper alone, compute capability 9.0")


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """A test that takes `place` runs under the simulator and, where there is one, on a GPU."""
    return Place(request.param)


@pytest.fixture
def flags(tmp_path: Path) -> Callable[..., list[str]]:
    """Command line of a tiny run of train.py; flags given later override these."""
    model = make_model_file(tmp_path / "tiny.bin", SMALL_VOCAB)
    data = make_shard(tmp_path / "train.bin", 2000, SMALL_VOCAB.vocab_size)

    def arguments(**changes):
        settings = {
            "model": model,
            "input_bin": data,
            "output_dir": tmp_path / "run",
            "device": "cpu",
            "batch_size": 2,
            "sequence_length": 8,
            "num_iterations": 4,
        }
        settings |= changes
        return [str(part) for name, value in settings.items() for part in (f"--{name}", value)]

    return arguments
