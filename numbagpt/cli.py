"""What the command-line programs share: flags with clear errors, and how a program ends."""

import argparse
import contextlib
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, TextIO, TypeVar

from numbagpt.errors import UserError, refusal
from numbagpt.modes import ATTENTIONS, PRECISIONS

if TYPE_CHECKING:
    from numbagpt.config import GPT2Config
    from numbagpt.device import Device

DEFAULT_OUTPUT_DIR = "out"
# What ends a program, and what it says then: Ctrl-C; the signal of `kill`, of a container being
# stopped, of a batch system whose time is up; and that of a terminal that was closed, which Windows
# does not have. The exit status is 128 + the signal, as in a shell.
STOP_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    STOP_SIGNALS[signal.SIGHUP] = "hung up"
CLEAN_UP_SECONDS = 3.0  # for which a program that was stopped may clean up undisturbed
LARGEST_INT = 10**38  # of a flag: its products still fit a float
# What is answered to a write where no more can be written; the rest speaks for itself.
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ECONNRESET}

Item = TypeVar("Item")


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


def note(line: str) -> None:
    """Print a line on stderr, if that can be written: the program can do without it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


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


class Stopped(Exception):
    """A stop signal came while an Interrupt was entered; status is the exit status for it."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number


class Interrupt:
    """While it is entered, a stop signal asks for a stop; the next is answered at once.

    notice   the line that is printed at the first, at once
    """

    def __init__(self, notice: str) -> None:
        self._notice = notice
        self._requested: int | None = None

    def __enter__(self) -> "Interrupt":
        self._before = _stop_handlers()
        _on_stop(self._note)
        return self

    def _note(self, number: int, _: object) -> None:
        self._requested = number
        _restore(self._before)
        _say(self._notice)

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    def check(self) -> None:
        """Raise Stopped if a stop was asked for."""
        if self._requested is not None:
            raise Stopped(self._requested)

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; once a stop was asked for, Stopped in place of the next."""
        for item in items:
            self.check()
            yield item


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside the block, which only imports, a stop signal ends the program at once.

    A KeyboardInterrupt does not always arrive where it could be caught: NumPy's and Numba's
    extension modules make other errors of it.
    """
    before = _stop_handlers()
    _on_stop(_end)
    try:
        yield
    finally:
        _restore(before)


class Terminated(KeyboardInterrupt):
    """Another stop signal than Ctrl-C's came. What cleans up after that does so after this, too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise_once() -> Callable[[int, object], None]:
    """A handler that raises KeyboardInterrupt, or Terminated, and lets the program clean up.

    Who presses Ctrl-C twice means it once: what comes within CLEAN_UP_SECONDS of a signal that was
    raised is ignored, or it would leave what is half removed. After that, one is raised again: the
    clean-up may hang, or the first have come where Python lets nothing be raised, as in a
    destructor.
    """
    deaf_until = -math.inf

    def handler(number: int, _: object) -> None:
        nonlocal deaf_until
        now = time.monotonic()
        if now >= deaf_until:
            deaf_until = now + CLEAN_UP_SECONDS
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    return handler


def _end(number: int, _: object) -> NoReturn:
    _say(STOP_SIGNALS[number])
    os._exit(128 + number)


def _stop_handlers() -> dict[int, Callable | int | None]:
    return {number: signal.getsignal(number) for number in STOP_SIGNALS}


def _on_stop(handler: Callable) -> None:
    """Make stop signals call the handler, but for an ignored one, as in a script's background."""
    for number, before in _stop_handlers().items():
        if before is not signal.SIG_IGN:
            signal.signal(number, handler)


def _restore(handlers: dict[int, Callable | int | None]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _say(line: str) -> None:
    """Print a line on stderr from a signal handler: print() might be the very thing interrupted."""
    if sys.stderr is not None:  # it is None where the shell closed it
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{line}\n".encode())


def run_module(name: str) -> int:
    """Import a module, which loads NumPy or Numba and takes a while, and run its `main`."""

    def program() -> int:
        with loading():
            module = import_module(name)
        return module.main()

    return run_program(program)


def run_program(program: Callable[[], int]) -> int:
    """Call the program and return its exit status; what a user can cause is printed as one line."""
    if sys.stdout is not None:  # it is None where the shell closed it (`>&-`)
        # A pipe gets each line as it comes, a console a question mark for a character it lacks.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    before = _stop_handlers()
    _on_stop(_raise_once())
    try:
        return program()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        note(STOP_SIGNALS[number])  # if it can be: the terminal may be closed
        return 128 + number
    except MemoryError as error:
        print(f"error: out of memory: {error}; take a smaller model or batch", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has gone (`| head`)
        _discard_output()
        return 1
    except OSError as error:
        reason = error.strerror or error
        if error.filename is not None:
            reason = f"cannot use {error.filename}: {refusal(error)}"
        elif error.errno in CANNOT_WRITE:
            _discard_output()
            reason = f"cannot write the output: {reason}"
        print(f"error: {reason}", file=sys.stderr)
        return 1
    finally:
        _restore(before)


def _discard_output() -> None:
    """Let what Python flushes when it exits go nowhere, so that it cannot fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
