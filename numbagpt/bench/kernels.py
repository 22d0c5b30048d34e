"""Every operation by itself: µs, GB/s or TFLOP/s, and the share of what this GPU can do.

Memory-bound operations are held against a copy: of 1 GiB, the GPU's best ("of peak"), and of as
many bytes as the operation moves ("of copy"), since no small kernel reaches the rate of a large
one. Bytes are those that must move: each input read once, each output written once, an accumulated
one both.
"""

from collections.abc import Callable, Iterator
from functools import partial

from numbagpt.bench.cases import Case, cases
from numbagpt.bench.timing import DOES_NOT_FIT, copy_bandwidth, measure, median_seconds
from numbagpt.config import GPT2Config
from numbagpt.errors import UserError

ROW = "{:31} {:34} {:>12} {:>6} {:>7} {:>7} {:>8} {:>12}"


def select(
    config: GPT2Config, B: int, T: int, storage: type, only: str, transposes: bool = False
) -> list[Case]:
    """The operations whose name holds `only`; transposes as in `cases`.

    Raises UserError if there is none.
    """
    every = list(cases(config, B, T, storage, transposes))
    if not (chosen := [case for case in every if only in case.name]):
        names = ", ".join(case.name for case in every)
        raise UserError(f"--only {only!r} is in no operation's name; expected a part of: {names}")
    return chosen


def report(chosen: list[Case], theirs: dict[str, Callable[[int], float | None]]) -> Iterator[str]:
    """The table's lines, one as each operation is measured.

    chosen   what is measured
    theirs   PyTorch's operations, for another column: see pytorch_operations
    """
    peak = measure(partial(copy_bandwidth, 8 << 28))
    yield f"copy of 1 GiB: {f'{peak / 1e9:.0f} GB/s' if peak else DOES_NOT_FIT}"
    heads = "operation", "shape", "µs", "GB/s", "of peak", "of copy", "TFLOP/s", "PyTorch"
    yield ROW.format(*heads)
    for case in chosen:
        peer = ""
        ours = _measured(case, peak)
        if case.name in theirs:
            seconds = theirs[case.name](case.nbytes)
            peer = f"{seconds * 1e6:.1f}" if seconds else DOES_NOT_FIT
        yield ROW.format(case.name, case.shape, *ours, peer).rstrip()


def _measured(case: Case, peak: float | None) -> tuple[str, str, str, str, str]:
    """The cells from µs to TFLOP/s."""
    seconds = measure(partial(median_seconds, case.make_call, case.nbytes))
    if seconds is None:
        return DOES_NOT_FIT, "", "", "", ""
    rate = case.nbytes / seconds
    times = f"{seconds * 1e6:.1f}", f"{rate / 1e9:.0f}"
    if case.flops:
        return *times, "", "", f"{case.flops / seconds / 1e12:.1f}"
    same_size = measure(partial(copy_bandwidth, case.nbytes))
    of_peak, of_copy = (f"{rate / copy:.0%}" if copy else "" for copy in (peak, same_size))
    return *times, of_peak, of_copy, ""


def pytorch_operations(
    config: GPT2Config, B: int, T: int, storage: type, precision: str
) -> dict[str, Callable[[int], float | None]]:
    """Name of an operation → function of the bytes of one call that measures PyTorch's seconds."""
    from numbagpt.bench import pytorch

    return {
        name: partial(pytorch.operation_seconds, make_call)
        for name, make_call in pytorch.operations(config, B, T, storage, precision).items()
    }
