"""MFU, peaks by GPU name, durations, the line of a step."""

import math
from pathlib import Path

import pytest

from numbagpt.errors import UserError
from numbagpt.metrics import (
    PEAKS,
    Progress,
    flops_per_token,
    format_duration,
    format_mfu,
    peak_flops,
)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200 NVL", "tf32", 417.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 PCIe", "fp32", 51),
        ("NVIDIA GH200 480GB", "fp32", 67),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A10", "tf32", 62.5),
        ("NVIDIA A10G", "tf32", 35),
        ("Tesla T4", "fp32", 8.1),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "tf32", 183),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("NVIDIA GeForce RTX 4090", "tf32", 82.6),
        ("NVIDIA GeForce RTX 5090", "fp32", 104.8),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "tf32", 1250),
    ],
)
def test_peak_of_the_names_that_drivers_report(name, precision, tflops):
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32"),  # another chip under a known name
        ("NVIDIA GeForce RTX 4090 D", "fp32"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "tf32"),
        ("NVIDIA A1000", "fp32"),
        ("AMD Instinct MI300X", "bf16"),
        ("", "fp32"),
        ("Tesla T4", "tf32"),  # no such mode before compute capability 8.0
        ("Tesla V100-SXM2-16GB", "bf16"),
    ],
)
def test_a_peak_that_is_not_known_is_none(name, precision):
    assert peak_flops(name, precision) is None


def test_lower_precision_is_never_slower():
    for peaks in PEAKS.values():
        known = [peak for peak in peaks if peak is not None]
        assert known == sorted(known)


def test_flops_of_gpt2_124m():
    # N = 124,439,808; L·C·T = 12·768·1024: 0.803 GFLOP a token, as llm.c counts it.
    assert flops_per_token(124_439_808, 12, 768, 1024) == 746_638_848 + 56_623_104


def test_mfu():
    assert format_mfu(203.5e12, 494.7e12) == "MFU 41.1%"
    assert format_mfu(203.5e12, None) == "MFU n/a"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3599.7, "1h00m"),
        (7620, "2h07m"),
        (86400 * 4 + 3600 * 3 + 59, "4d03h"),
    ],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    """Time stands still until a test moves it."""

    class Clock:
        now = 0.0

    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)
    return Clock


def test_progress_prints_rates_and_the_time_left(clock, capsys):
    progress = Progress(100, tokens_per_step=1000, flops_per_token=2_000_000, peak=1e12)
    clock.now = 5.0
    progress.restart_clock()  # what comes before the first step comes once
    clock.now = 35.0
    progress.report(10.82564, 1.5, 2e-4)
    clock.now = 35.1
    progress.report(9.5, 0.12345, 4e-4)
    clock.now = 38.1
    progress.restart_clock()  # three seconds went into something else
    clock.now = 38.3
    progress.report(9.25, 12.0, 6e-4)
    assert capsys.readouterr().out.splitlines() == [
        "step   1/100 | loss 10.8256 | norm 1.500 | lr 2.00e-04 | 30000.0 ms | 33 tok/s | MFU 0.0%",
        # the first step, which compiled, is not held against the 98 that are left
        "step   2/100 | loss 9.5000 | norm 0.123 | lr 4.00e-04"
        " | 100.0 ms | 10,000 tok/s | MFU 2.0% | 10s left",
        "step   3/100 | loss 9.2500 | norm 12.000 | lr 6.00e-04"
        # 97 steps of 0.11 s, and a second between any two
        " | 200.0 ms | 5,000 tok/s | MFU 1.0% | 1m48s left",
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["loss", "gradient norm"])
def test_progress_stops_at_what_is_not_finite(bad, which, capsys):
    progress = Progress(10, 1, 1, None)
    progress.report(1.0, 1.0, 1.0)
    progress.last_checkpoint = Path("out/model_00000001.bin")
    values = (bad, 1.0) if which == "loss" else (1.0, bad)
    with pytest.raises(UserError) as error:
        progress.report(*values, 1.0)
    assert str(error.value) == (
        f"the {which} of step 2 is {bad}; the last checkpoint is {Path('out/model_00000001.bin')}; "
        "lower --learning_rate or lengthen --warmup_iters"
    )
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("source", [Path("start.bin"), None])
def test_the_first_weights_are_to_blame_until_they_were_changed(source):
    progress = Progress(10, 1, 1, None, source)
    damaged = f"before anything was learned: the weights in {source} are damaged"
    blamed = damaged if source else "lower --learning_rate"
    with pytest.raises(UserError, match=f"^the validation loss of step 0 is nan.*{blamed}"):
        progress.check_finite("validation loss", math.nan, 0)
    with pytest.raises(UserError, match=f"^the gradient norm of step 1 is inf.*{blamed}"):
        progress.report(1.0, math.inf, 1.0)
    with pytest.raises(UserError, match=r"^the validation loss of step 1 is nan; .*lower --learn"):
        progress.check_finite("validation loss", math.nan, 1)
    with pytest.raises(
        UserError, match=r"^the loss of step 2 is nan; no checkpoint was written; low"
    ):
        progress.report(math.nan, 1.0, 1.0)
