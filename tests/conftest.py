"""Where a test runs: on a GPU if it is marked `gpu`, and nowhere but with a reason why not."""

import signal

import pytest
from check import Place
from numba import cuda

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
