"""MFU, peaks by GPU name, durations."""

import pytest

from numbagpt.metrics import PEAKS, flops_per_token, format_duration, format_mfu, peak_flops


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
