"""The flags of the command-line programs: clear errors, and what several programs share."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TextIO

from numbagpt.modes import ATTENTIONS, PRECISIONS
from numbagpt.program import note

if TYPE_CHECKING:
    from numbagpt.config import GPT2Config
    from numbagpt.device import Device

DEFAULT_OUTPUT_DIR = "out"
LARGEST_INT = 10**38  # of a flag: its products still fit a float


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line. Flags cannot be abbreviated."""

    def __init__(self, description: str, prog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def section(self, title: str) -> None:
        """Begin a group of flags in --help."""
        self._section = self.add_argument_group(title)

    def flag(self, name: str, kind: Callable, default: object, text: str) -> None:
        """Add a flag to the section; text states the default where that is None."""
        if default is not None:
            text += " (default: %(default)s)"
        metavar = "PATH" if kind is path else kind.__name__
        self._section.add_argument(name, type=kind, default=default, help=text, metavar=metavar)

    def choice(self, name: str, choices: tuple[str, ...], text: str) -> None:
        """Add a flag with a few values, the first of them the default."""
        self._section.add_argument(name, choices=choices, default=choices[0], help=text)

    def text(self, name: str, text: str, default: str = "") -> None:
        """Add a flag whose value is any text."""
        self._section.add_argument(name, default=default, help=text, metavar="TEXT")

    def switch(self, name: str, text: str) -> None:
        """Add a flag without a value."""
        self._section.add_argument(name, action="store_true", help=text)

    def print_help(self, file: TextIO | None = None) -> None:
        """Print --help; OSError if that cannot be written, of which argparse says nothing."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2, as argparse does, without the usage."""
        if message.endswith("expected one argument"):
            message += "; write --flag=-x for a value that begins with -"
        stray = message.removeprefix("unrecognized arguments: ")
        if stray != message and not stray.startswith("-"):  # of a pattern that the shell expanded
            message += "; put a pattern, or a value with spaces, in quotes"
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def path(text: str) -> str:
    """The type of a flag: a path, which is not empty as that of an unset shell variable is.

    ~ is the home folder also where the shell leaves it alone, as in --output_dir=~/data. What
    begins with ~ and names nobody's home is taken as it is; so is ./~.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; expected a file or folder")
    return os.path.expanduser(text)


def number(
    kind: type[int] | type[float],
    low: float,
    high: float = float("inf"),
    *,
    above: bool = False,
    or_zero: bool = False,
) -> Callable[[str], float]:
    """The type of a flag: an int or float from low to high.

    above     more than low
    or_zero   0 as well
    """
    expected = "a whole number" if kind is int else "a number"
    expected += f" above {low}" if above else f" from {low}"
    expected += f" to {high}" if high < float("inf") else "" if above else " up"
    expected += ", or 0" if or_zero else ""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        # NaN compares false with everything; infinity is no setting either.
        within = low <= value <= high and value < float("inf") and not (above and value == low)
        if not within and not (or_zero and value == 0):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        if kind is int and value > LARGEST_INT:
            raise argparse.ArgumentTypeError(f"{text} is too large; expected at most 1e38")
        return value

    parse.__name__ = "N" if kind is int else "X"
    return parse


def add_device_flags(parser: Parser) -> None:
    """Add --device, --precision, --attention, --graph and --seed."""
    parser.section("where and how it is computed")
    parser.choice(
        "--device",
        ("auto", "cuda", "cpu", "sim"),
        "sim runs the GPU's kernels without a GPU, slowly (default: the GPU if there is one)",
    )
    parser.choice(
        "--precision",
        ("auto", *PRECISIONS),
        "what is stored and multiplied (default: bf16 on GPUs from compute capability 8.0 on, tf32 "
        "there where bf16 does not take the model's shape, else fp32)",
    )
    parser.choice(
        "--attention",
        ("auto", *ATTENTIONS),
        "materialized is slow and writes all scores to memory (default: flash where it is there)",
    )
    parser.flag(
        "--graph", number(int, 0, 1), 1, "0: queue kernels one by one, for debugging and profiling"
    )
    parser.flag("--seed", number(int, 0), 42, "of everything random: the same seed, the same run")


def choose_device(options: argparse.Namespace) -> tuple["Device", str]:
    """The device that --device and --graph ask for, and the processor's name.

    Prints one line on stderr if `auto` finds no GPU. Raises UserError for what this machine cannot
    do.
    """
    from numbagpt.device import select_device

    device, problem = select_device(options.device, use_graphs=options.graph == 1)
    if problem:
        note(f"the CPU is used: {problem}")
    if device.name != "cuda":
        return device, device.name
    from numbagpt.gpu import kernel, runtime

    kernel.on_compile = _say_compiled
    return device, runtime.gpu_info().name


def _say_compiled(name: str, seconds: float) -> None:
    note(f"compiled {name} in {seconds:.1f} s, for this and later runs")


def model_options(
    options: argparse.Namespace, device: "Device", config: "GPT2Config"
) -> dict[str, str | None]:
    """What --precision and --attention say, and what they leave open decided: GPT2's arguments.

    Raises UserError for a precision that the device does not have.
    """
    from numbagpt.state import best_precision

    precision = options.precision
    if precision == "auto":
        precision = best_precision(device, config)
    device.check_precision(precision)
    attention = None if options.attention == "auto" else options.attention
    return {"precision": precision, "attention": attention}
