"""Every operation by itself: µs, GB/s or TFLOP/s, and the share of what this GPU can do.

Memory-bound operations are held against a copy: of 1 GiB, the GPU's best ("of peak"), and of as
many bytes as the operation moves ("of copy"), since no small kernel reaches the rate of a large
one. Bytes are those that must move: each input read once, each output written once, an accumulated
one both.
"""

from collections.abc import Callable, Iterator
from functools import partial

from numbagpt.bench.cases import cases
from numbagpt.bench.timing import copy_bandwidth, median_seconds
from numbagpt.config import GPT2Config


def report(
    config: GPT2Config, B: int, T: int, storage: type, only: str, peer: bool
) -> Iterator[str]:
    """The table's lines, one as each operation is measured.

    only   selects by part of the name
    peer   adds PyTorch's time where it has the operation
    """
    peak = copy_bandwidth(8 << 28)
    theirs = pytorch_operations(config, B, T, storage) if peer else {}
    yield f"copy of 1 GiB: {peak / 1e9:.0f} GB/s"
    yield (
        f"{'operation':26} {'shape':34} {'µs':>9} {'GB/s':>6} {'of peak':>7} {'of copy':>7} "
        f"{'TFLOP/s':>8} {'PyTorch':>9}"
    )
    for case in cases(config, B, T, storage):
        if only not in case.name:
            continue
        seconds = median_seconds(case.make_call, case.nbytes)
        rate = case.nbytes / seconds
        if case.flops:
            columns = f"{'':15} {case.flops / seconds / 1e12:8.1f}"
        else:
            same_size = copy_bandwidth(case.nbytes)
            columns = f"{rate / peak:7.0%} {rate / same_size:7.0%} {'':8}"
        if case.name in theirs:
            columns += f" {theirs[case.name](case.nbytes) * 1e6:9.1f}"
        yield f"{case.name:26} {case.shape:34} {seconds * 1e6:9.1f} {rate / 1e9:6.0f} {columns}"


def pytorch_operations(
    config: GPT2Config, B: int, T: int, storage: type
) -> dict[str, Callable[[int], float]]:
    """Name of an operation → function of the bytes of one call that measures PyTorch's seconds."""
    from numbagpt.bench import pytorch

    return {
        name: partial(pytorch.operation_seconds, make_call)
        for name, make_call in pytorch.operations(config, B, T, storage).items()
    }
