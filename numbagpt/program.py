"""How a program is run, what a stop signal does to it, and the line and status it ends with.

A program imports this first, and it imports nothing slow. From `run` on, and so while NumPy and
Numba load, which takes a second, Ctrl-C is answered in one line; before that, Python answers it.
"""

import contextlib
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import NoReturn, TypeVar

from numbagpt.errors import UserError, refusal

# What ends a program, and what it says then: Ctrl-C; the signal of `kill`, of a container being
# stopped, of a batch system whose time is up; and that of a terminal that was closed, which Windows
# does not have. The exit status is 128 + the signal, as in a shell.
STOP_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    STOP_SIGNALS[signal.SIGHUP] = "hung up"
CLEAN_UP_SECONDS = 3.0  # for which a program that was stopped may clean up undisturbed
# What is answered to a write where no more can be written; the rest speaks for itself.
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ECONNRESET}

Item = TypeVar("Item")


def run_module(name: str) -> int:
    """Import a module, which loads NumPy or Numba and takes a while, and run its `main`."""

    def main() -> int:
        with loading():
            module = import_module(name)
        return module.main()

    return run(main)


def run(main: Callable[[], int]) -> int:
    """Call main and return its exit status; what a user can cause is printed as one line."""
    if sys.stdout is not None:  # it is None where the shell closed it (`>&-`)
        # A pipe gets each line as it comes, a console a question mark for a character it lacks.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    before = _stop_handlers()
    _on_stop(_raise_once())
    try:
        return main()
    except UserError as error:
        note(f"error: {error}")
        return 1
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        note(STOP_SIGNALS[number])
        return 128 + number
    except MemoryError as error:
        note(f"error: out of memory: {error}; take a smaller model or batch")
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
        note(f"error: {reason}")
        return 1
    finally:
        _restore(before)


def _discard_output() -> None:
    """Let what Python flushes when it exits go nowhere, so that it cannot fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(line: str) -> None:
    """Print a line on stderr, if that can be written: the status says as much as must be said."""
    if sys.stderr is not None:  # it is None where the shell closed it: print() would take stdout
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)


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


def _end(number: int, _: object) -> NoReturn:
    _say(STOP_SIGNALS[number])
    os._exit(128 + number)


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
