"""Tests marked `gpu` run where there is a GPU and say why where there is none."""

import signal

import pytest

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
