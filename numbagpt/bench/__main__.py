"""python -m numbagpt.bench [train|kernels]: how fast the training step and its operations are."""

if __name__ == "__main__":  # before the imports, so that Ctrl-C is answered while they last
    import sys

    from numbagpt import program

    sys.exit(program.run_module("numbagpt.bench.__main__"))

import importlib.util

import numpy as np

from numbagpt import flags, program
from numbagpt.bench import kernels, train
from numbagpt.config import PRESETS
from numbagpt.device import select_device
from numbagpt.errors import UserError
from numbagpt.gpu import blas, runtime
from numbagpt.modes import ATTENTIONS, PRECISIONS
from numbagpt.ops.matmul import transpose_pays
from numbagpt.state import best_precision

PARTS = ("all", "train", "kernels")
number = flags.number(int, 1, 1 << 20)


def batch_sizes(text: str) -> list[int]:
    """The type of --batch_sizes: whole numbers, separated by commas."""
    return [number(B) for B in text.split(",")]


batch_sizes.__name__ = "N,N"  # in --help


def has_pytorch() -> bool:
    """Whether PyTorch is installed and finds the GPU; a line on stderr if it is and does not."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    if not torch.cuda.is_available():
        program.note(
            f"PyTorch is left out: version {torch.__version__} finds no GPU; install one for the "
            "driver's CUDA to have it measured"
        )
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = flags.Parser(__doc__, prog="python -m numbagpt.bench")
    parser.section("what is measured")
    # no choices: argparse would complain of the value of a flag it does not know
    parser.add_argument(
        "part", nargs="?", default="all", help="train, kernels or all (default: all)"
    )
    parser.text("--model", f"the shape: {', '.join(PRESETS)} (default: d12)", "d12")
    parser.flag("--batch_sizes", batch_sizes, "4,16", "B, one or more; kernels take the last")
    parser.flag("--sequence_length", number, 1024, "T")
    parser.choice("--precision", ("auto", *PRECISIONS), "(default: bf16 if the GPU has it)")
    parser.choice("--attention", ("auto", *ATTENTIONS), "(default: flash if the GPU has it)")
    parser.flag("--recompute", flags.number(int, 0, 2), 0, "see train.py")
    parser.text("--only", "kernels whose name holds this (default: all)")
    parser.flag("--peer", flags.number(int, 0, 1), 1, "0: without PyTorch, even if it is installed")
    options = parser.parse_args(argv)
    if options.part not in PARTS:
        parser.error(f"there is no {options.part!r} to measure; expected one of {', '.join(PARTS)}")
    if options.model not in PRESETS:
        parser.error(f"--model {options.model}; expected one of {', '.join(PRESETS)}")
    if problem := runtime.gpu_problem():
        raise UserError(f"the benchmarks need a GPU: {problem}")
    config, T = PRESETS[options.model], options.sequence_length
    precision = options.precision
    if precision == "auto":
        precision = best_precision(select_device("cuda")[0], config)
    peer = options.peer == 1 and has_pytorch()
    shape = config, options.batch_sizes[-1], T, np.uint16 if precision == "bf16" else np.float32
    if options.part in ("all", "kernels"):
        transposes = transpose_pays(precision, runtime.gpu_info().compute_capability)
        # refuses before minutes of training
        chosen = kernels.select(*shape, options.only, transposes)
    if options.part in ("all", "train"):
        attention = None if options.attention == "auto" else options.attention
        model = {"attention": attention, "recompute": options.recompute}
        for line in train.report(config, options.batch_sizes, T, precision, peer, **model):
            print(line, flush=True)
    if options.part in ("all", "kernels"):
        blas.set_precision(precision)
        theirs = kernels.pytorch_operations(*shape, precision) if peer else {}
        for line in kernels.report(chosen, theirs):
            print(line, flush=True)
    return 0
