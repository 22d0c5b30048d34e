"""Fixtures of the tests of the operations."""

import pytest
from check import Place
from numba import cuda


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not cuda.is_available():
        pytest.skip("no NVIDIA GPU here")


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """A test that takes `place` runs under the simulator and, where there is one, on a GPU."""
    return Place(request.param)
