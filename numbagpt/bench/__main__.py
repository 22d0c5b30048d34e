"""python -m numbagpt.bench [train|kernels]: how fast the training step and its operations are."""

import sys

import numpy as np

from numbagpt import cli
from numbagpt.bench import kernels, train
from numbagpt.config import PRESETS
from numbagpt.errors import UserError
from numbagpt.gpt2 import PRECISIONS
from numbagpt.gpu import blas, runtime


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = cli.Parser(__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "train", "kernels"), default="all")
    parser.add_argument("--model", choices=sorted(PRESETS), default="d12", help="its shape")
    parser.add_argument("--batch_sizes", default="4,16", help="B, separated by commas")
    parser.add_argument("--sequence_length", type=int, default=1024, help="T")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32")
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    options = parser.parse_args(argv)
    if problem := runtime.gpu_problem():
        raise UserError(f"the benchmarks need a GPU: {problem}")
    config, T = PRESETS[options.model], options.sequence_length
    batch_sizes = [int(B) for B in options.batch_sizes.split(",")]
    if options.what in ("all", "train"):
        for line in train.report(config, batch_sizes, T, options.precision):
            print(line, flush=True)
    if options.what in ("all", "kernels"):
        blas.set_precision(options.precision)
        for line in kernels.report(config, batch_sizes[-1], T, np.float32, options.only):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
