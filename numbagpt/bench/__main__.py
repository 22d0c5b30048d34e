"""python -m numbagpt.bench [train|kernels]: how fast the training step and its operations are."""

if __name__ == "__main__":  # before the imports, so that Ctrl-C is answered while they last
    import sys

    from numbagpt import cli

    sys.exit(cli.run_module("numbagpt.bench.__main__"))

import argparse
import importlib.util
import sys

import numpy as np

from numbagpt import cli
from numbagpt.bench import kernels, train
from numbagpt.config import PRESETS
from numbagpt.device import select_device
from numbagpt.errors import UserError
from numbagpt.gpu import blas, runtime
from numbagpt.modes import ATTENTIONS, PRECISIONS
from numbagpt.ops.matmul import transpose_pays
from numbagpt.state import best_precision


def has_pytorch() -> bool:
    """Whether PyTorch is installed and finds the GPU; a line on stderr if it is and does not."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    if not torch.cuda.is_available():
        print(
            f"PyTorch is left out: version {torch.__version__} finds no GPU; install one for the "
            "driver's CUDA to have it measured",
            file=sys.stderr,
        )
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = cli.Parser(__doc__, prog="python -m numbagpt.bench")
    number = cli.number(int, 1, 1 << 20)
    parser.section("what is measured")
    parser.add_argument("what", nargs="?", choices=("all", "train", "kernels"), default="all")
    parser.text("--model", f"the shape: {', '.join(PRESETS)} (default: d12)", "d12")
    parser.text(
        "--batch_sizes", "B, separated by commas; kernels take the last (default: 4,16)", "4,16"
    )
    parser.flag("--sequence_length", number, 1024, "T")
    parser.choice("--precision", ("auto", *PRECISIONS), "(default: bf16 if the GPU has it)")
    parser.choice("--attention", ("auto", *ATTENTIONS), "(default: flash if the GPU has it)")
    parser.flag("--recompute", cli.number(int, 0, 2), 0, "see train.py")
    parser.text("--only", "kernels whose name holds this (default: all)")
    parser.flag("--peer", cli.number(int, 0, 1), 1, "0: without PyTorch, even if it is installed")
    options = parser.parse_args(argv)
    if options.model not in PRESETS:
        raise UserError(f"--model {options.model}; expected one of {', '.join(PRESETS)}")
    try:
        batch_sizes = [number(B) for B in options.batch_sizes.split(",")]
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--batch_sizes {options.batch_sizes}: {error}") from None
    if problem := runtime.gpu_problem():
        raise UserError(f"the benchmarks need a GPU: {problem}")
    config, T = PRESETS[options.model], options.sequence_length
    precision = options.precision
    if precision == "auto":
        precision = best_precision(select_device("cuda")[0], config)
    peer = options.peer == 1 and has_pytorch()
    shape = config, batch_sizes[-1], T, np.uint16 if precision == "bf16" else np.float32
    if options.what in ("all", "kernels"):
        transposes = transpose_pays(precision, runtime.gpu_info().compute_capability)
        # refuses before minutes of training
        chosen = kernels.select(*shape, options.only, transposes)
    if options.what in ("all", "train"):
        attention = None if options.attention == "auto" else options.attention
        model = {"attention": attention, "recompute": options.recompute}
        for line in train.report(config, batch_sizes, T, precision, peer, **model):
            print(line, flush=True)
    if options.what in ("all", "kernels"):
        blas.set_precision(precision)
        theirs = kernels.pytorch_operations(*shape, precision) if peer else {}
        for line in kernels.report(chosen, theirs):
            print(line, flush=True)
    return 0
