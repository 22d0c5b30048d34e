"""What is said of each step: loss, gradient norm, tokens per second, MFU, time left.

MFU is the share of the GPU's peak that the model's own arithmetic uses (Chowdhery et al., 2022,
arXiv:2204.02311, appendix B). The arithmetic is counted as llm.c counts it:

    FLOPs per token = 6 N + 6 L C T

N is every parameter, embeddings included (the rows that pad the vocabulary, 0.03 % in GPT-2 124M,
are left out here): one multiply-add forward and two backward, 2 FLOPs each. The second term is
attention: QKᵀ and att·V are 2·2·C·T forward and twice that backward, halved because half of the
T×T scores are masked. nanoGPT does not halve it and prints a higher number.
"""

import math
import re
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

from numbagpt.errors import NotFinite


class Peaks(NamedTuple):
    """Dense peaks of one GPU in TFLOP/s; None where the GPU has no such mode."""

    fp32: float  # CUDA cores
    tf32: float | None  # tensor cores
    bf16: float | None  # tensor cores, accumulating in float32


# From NVIDIA's data sheets and architecture white papers (Volta, Turing, Ampere GA100 and GA102,
# Ada, Hopper, Blackwell). Figures that a data sheet gives "with sparsity" are halved. The key is
# the name that the driver reports, without the vendor, the family and the memory size.
PEAKS = {
    "V100 PCIE": Peaks(14.0, None, None),
    "V100 SXM2": Peaks(15.7, None, None),
    "V100 SXM3": Peaks(15.7, None, None),
    "V100S PCIE": Peaks(16.4, None, None),
    "T4": Peaks(8.1, None, None),
    "A100 SXM4": Peaks(19.5, 156, 312),
    "A100 PCIE": Peaks(19.5, 156, 312),
    "A800 SXM4": Peaks(19.5, 156, 312),
    "A800 PCIE": Peaks(19.5, 156, 312),
    "A30": Peaks(10.3, 82, 165),
    "A10": Peaks(31.2, 62.5, 125),
    "A10G": Peaks(35, 35, 70),
    "A40": Peaks(37.4, 74.8, 149.7),
    "RTX A5000": Peaks(27.8, 55.6, 111.1),
    "RTX A6000": Peaks(38.7, 77.4, 154.8),
    "RTX 3080": Peaks(29.8, 29.8, 59.5),
    "RTX 3090": Peaks(35.6, 35.6, 71),
    "RTX 3090 TI": Peaks(40, 40, 80),
    "L4": Peaks(30.3, 60, 121),
    "L40": Peaks(90.5, 90.5, 181),
    "L40S": Peaks(91.6, 183, 362),
    "RTX 6000 ADA GENERATION": Peaks(91.1, 182.1, 364.2),
    "RTX 4080": Peaks(48.7, 48.7, 97.5),
    "RTX 4090": Peaks(82.6, 82.6, 165.2),
    "H100 PCIE": Peaks(51, 378, 756),
    "H100 NVL": Peaks(60, 417.5, 835),
    "H100 HBM3": Peaks(67, 494.7, 989.4),
    "H800": Peaks(67, 494.7, 989.4),
    "H20": Peaks(44, 74, 148),
    "H200": Peaks(67, 494.7, 989.4),
    "H200 NVL": Peaks(60, 417.5, 835),
    "GH200": Peaks(67, 494.7, 989.4),
    "RTX 5080": Peaks(56.3, 56.3, 112.6),
    "RTX 5090": Peaks(104.8, 104.8, 209.5),
    "B200": Peaks(75, 1125, 2250),
    "B300 SXM6 AC": Peaks(75, 1125, 2250),
    "GB200": Peaks(80, 1250, 2500),
    "GB300": Peaks(80, 1250, 2500),
}

_NOT_IN_KEYS = re.compile(r"NVIDIA|TESLA|GEFORCE|\d+GB?")


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """The dense peak in FLOP/s of the GPU that the driver calls `gpu_name`, None if unknown.

    precision   fp32, tf32 or bf16

    The match is exact up to vendor and memory size: a laptop's part, a MIG slice or a cut-down
    edition of a listed GPU has another peak, and no number is better than a wrong one.
    """
    words = re.split(r"[\s-]+", gpu_name.upper())
    key = " ".join(word for word in words if word and not _NOT_IN_KEYS.fullmatch(word))
    peaks = PEAKS.get(key)
    tflops = peaks and getattr(peaks, precision)
    return tflops * 1e12 if tflops else None


def flops_per_token(num_parameters: int, num_layers: int, channels: int, T: int) -> int:
    """6 N + 6 L C T: the FLOPs of training on one token in a sequence of T (see the module)."""
    return 6 * num_parameters + 6 * num_layers * channels * T


def format_mfu(flops_per_second: float, peak: float | None) -> str:
    """`MFU 41.3%`, or `MFU n/a` where the peak is unknown."""
    return f"MFU {flops_per_second / peak:.1%}" if peak else "MFU n/a"


def format_duration(seconds: float) -> str:
    """A duration to two units: `8s`, `3m05s`, `2h07m`, `4d03h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


class Progress:
    """Prints one line for each step as its result comes in, and stops a run that went astray.

    num_iterations     steps in all
    tokens_per_step    of all batches of a step
    flops_per_token    see flops_per_token()
    peak               of the processor in FLOP/s, None if unknown
    source             where the first weights were read, None if they are random

    steps              how many were reported
    last_checkpoint    what was written last, for the message of a run that is stopped

    The time of a step runs from the result before it to its own: what the host waits for counts.
    The time left allows for what is done between the steps, as much as there was for each so far.
    """

    def __init__(
        self,
        num_iterations: int,
        tokens_per_step: int,
        flops_per_token: int,
        peak: float | None,
        source: Path | None = None,
    ) -> None:
        self.steps = 0
        self.last_checkpoint: Path | None = None
        self._num_iterations = num_iterations
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_token, peak
        self._source = source
        self._average: float | None = None
        self._between_steps = 0.0
        self._clock = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave the time since the last result out of the next step's: something else took it."""
        now = time.perf_counter()
        if self.steps:
            self._between_steps += now - self._clock
        self._clock = now

    def report(self, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Print the next step's line. Raises NotFinite if loss or norm is not finite."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.steps += 1
        self.check_finite("loss", loss, self.steps - 1)
        self.check_finite("gradient norm", grad_norm, self.steps - 1)
        parts = [
            f"step {self.steps:{len(str(self._num_iterations))}}/{self._num_iterations}",
            f"loss {loss:.4f}",
            f"norm {grad_norm:.3f}",
            f"lr {learning_rate:.2e}",
            f"{1000 * seconds:.1f} ms",
            f"{self._tokens / seconds:,.0f} tok/s",
            format_mfu(self._tokens * self._flops / seconds, self._peak),
        ]
        # The first step compiles the kernels: its time says nothing about the others'.
        if self.steps > 1:
            past = seconds if self._average is None else self._average
            self._average = 0.9 * past + 0.1 * seconds
            for_each = self._average + self._between_steps / self.steps
            parts.append(f"{format_duration((self._num_iterations - self.steps) * for_each)} left")
        print(" | ".join(parts))

    def check_finite(self, name: str, value: float, updates: int) -> None:
        """Raise NotFinite if the value, of the loss or the like, is not; see not_finite."""
        if not math.isfinite(value):
            self.not_finite(f"the {name} of step {self.steps} is {value}", updates)

    def not_finite(self, what: str, updates: int) -> NoReturn:
        """Raise NotFinite, saying what is not finite, what was saved, and a remedy.

        updates   of the weights that gave it: before the first, it is the weights' own fault
        """
        if updates == 0 and self._source:
            raise NotFinite(
                f"{what} before anything was learned: the weights in {self._source} are damaged; "
                "start from others"
            )
        raise NotFinite(
            f"{what}; {self.what_was_saved()}; lower --learning_rate or lengthen --warmup_iters"
        )

    def what_was_saved(self) -> str:
        """What is left of a run that ends here, as a part of its last line."""
        last = self.last_checkpoint
        return f"the last checkpoint is {last}" if last else "no checkpoint was written"
