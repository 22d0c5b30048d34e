"""Run a test on every device there is."""

import pytest

from numbagpt.device import select_device

# `device` is a function that makes the device, so that a test that is skipped touches no GPU.
on_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(lambda: select_device("cpu")[0], id="cpu"),
        pytest.param(lambda: select_device("cuda")[0], id="cuda", marks=pytest.mark.gpu),
    ],
)
