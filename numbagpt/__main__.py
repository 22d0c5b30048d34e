"""`python -m numbagpt`: what was found on this machine, for a bug report."""

import sys

from numbagpt import flags, program


def main(argv: list[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    flags.Parser(__doc__, prog="python -m numbagpt").parse_args(argv)
    with program.loading():
        from numbagpt.gpu.runtime import report
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main))
