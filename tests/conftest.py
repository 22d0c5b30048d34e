"""Tests marked `gpu` run where there is a GPU and say why where there is none."""

import pytest

from numbagpt.gpu import runtime


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = runtime.gpu_problem()
    if problem:
        skip = pytest.mark.skip(reason=problem)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
