"""How the programs answer signals and the system's refusals."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from programs import ROOT

from numbagpt import program
from numbagpt.errors import UserError

# Takes the place of NumPy: a signal comes while it is imported, and the extension module that is
# being loaded makes another error of it, as NumPy's do.
INTERRUPTED_NUMPY = """
import os, signal
try:
    os.kill(os.getpid(), signal.{})
except KeyboardInterrupt:
    raise ImportError("datetime could not be imported") from None
"""

PROGRAMS = {
    "train": [ROOT / "train.py"],
    "sample": [ROOT / "sample.py", "--checkpoint", "."],
    "report": ["-m", "numbagpt"],
    "data": ["-m", "numbagpt.data", "a.txt", "--output_dir", "out"],
    "export": ["-m", "numbagpt.checkpoint", "export", "a.bin", "out"],
    "bench": ["-m", "numbagpt.bench"],
    "offline": ["-m", "numbagpt.gpu.offline"],
}


def while_it_loads(name, sent, tmp_path):
    """What a program that gets a signal while it loads returns and prints."""
    modules, folder = tmp_path / "modules", tmp_path / "folder"
    modules.mkdir()
    folder.mkdir()
    (modules / "numpy.py").write_text(INTERRUPTED_NUMPY.format(sent))
    ended = subprocess.run(
        [sys.executable, *map(str, PROGRAMS[name])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{modules}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not list(folder.iterdir())
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_while_a_program_loads_is_answered_in_one_line(name, tmp_path):
    assert while_it_loads(name, "SIGINT", tmp_path) == (130, "", "interrupted\n")


@pytest.mark.parametrize("name", ["train", "data"])
def test_sigterm_while_a_program_loads_is_answered_in_one_line(name, tmp_path):
    assert while_it_loads(name, "SIGTERM", tmp_path) == (143, "", "terminated\n")


NUMBAS_SIMULATOR = "NUMBA_ENABLE_CUDASIM replaces CUDA; unset it (--device sim needs no variable)\n"


def with_numbas_simulator(arguments, folder):
    """What Python returns and prints where Numba's own simulator takes the place of CUDA."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["train", "sample", "bench", "offline"])
def test_numbas_simulator_is_refused_in_one_line(name, tmp_path):
    ended = with_numbas_simulator(PROGRAMS[name], tmp_path)
    assert ended == (1, "", f"error: {NUMBAS_SIMULATOR}")
    assert not list(tmp_path.iterdir())


def test_numbas_simulator_is_refused_when_an_operation_is_imported(tmp_path):
    status, _, stderr = with_numbas_simulator(["-c", "import numbagpt.ops.gelu"], tmp_path)
    assert status == 1
    assert stderr.endswith(f"numbagpt.errors.UserError: {NUMBAS_SIMULATOR}")


# The first signal comes when the first shard has begun, the second when it is about to be removed.
TERMINATED_DATA = """
import os, signal, sys, tempfile
from numbagpt import data, program

def write_files(files, writer, args):
    writer.write("train", data.np.zeros(3, data.np.uint16))
    print(*os.listdir("out"))
    os.kill(os.getpid(), signal.SIGTERM)

def cleanup(folder, remove=tempfile.TemporaryDirectory.cleanup):
    os.kill(os.getpid(), signal.SIGINT)
    remove(folder)

data.write_files = write_files
tempfile.TemporaryDirectory.cleanup = cleanup
sys.exit(program.run(lambda: data.main(["a.txt", "--output_dir", "out"])))
"""


def test_a_signal_and_one_more_leave_no_litter(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    ended = subprocess.run(
        [sys.executable, "-c", TERMINATED_DATA],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (143, "terminated\n")
    assert ended.stdout.startswith(".a.")  # there was some
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_asks_for_a_stop_and_the_second_stops(capfd):
    before = signal.getsignal(signal.SIGINT)
    with program.Interrupt("stopping") as interrupt:
        items = interrupt.watch("abc")
        assert next(items) == "a"
        interrupt.check()
        ctrl_c()
        assert capfd.readouterr() == ("", "stopping\n")
        with pytest.raises(program.Stopped):
            next(items)
        with pytest.raises(program.Stopped) as stopped:
            interrupt.check()
        assert stopped.value.status == 130
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("second", program.STOP_SIGNALS)
def test_a_second_signal_does_not_disturb_the_clean_up(second, monkeypatch, capfd):
    seconds = [100.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: seconds[0])
    done = []

    def main():
        try:
            ctrl_c()
        finally:
            seconds[0] += program.CLEAN_UP_SECONDS - 0.1
            os.kill(os.getpid(), second)
            done.append("cleaned up")

    assert program.run(main) == 130
    assert done == ["cleaned up"]
    assert capfd.readouterr() == ("", "interrupted\n")


def test_a_signal_that_was_lost_can_be_sent_again(monkeypatch, capfd):
    seconds = [100.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: seconds[0])

    def main():
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        ctrl_c()
        seconds[0] += program.CLEAN_UP_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it was not answered")

    assert program.run(main) == 143
    assert capfd.readouterr() == ("", "terminated\n")


@pytest.mark.parametrize("number", program.STOP_SIGNALS)
def test_a_signal_that_is_ignored_stays_so(number, capfd):
    before = signal.signal(number, signal.SIG_IGN)

    def main():
        with program.loading(), program.Interrupt("stopping") as interrupt:
            os.kill(os.getpid(), number)
            interrupt.check()
        assert signal.getsignal(number) is signal.SIG_IGN
        return 0

    try:
        assert program.run(main) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert capfd.readouterr() == ("", "")


def test_a_program_leaves_the_handlers_as_they_were():
    before = [signal.getsignal(number) for number in program.STOP_SIGNALS]
    within = []
    assert program.run(lambda: within.append(signal.getsignal(signal.SIGTERM)) or 0) == 0
    assert within[0] not in (signal.SIG_DFL, signal.SIG_IGN)
    assert [signal.getsignal(number) for number in program.STOP_SIGNALS] == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, a disk that is full")
@pytest.mark.parametrize("name", ["train", "data", "bench"])
def test_help_that_cannot_be_written(name):
    arguments = [*map(str, PROGRAMS[name]), "--help"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left"), "cannot write the output: No space left"),
        (OSError(errno.EIO, "I/O error"), "cannot write the output: I/O error"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (OSError("no errno"), "no errno"),
        (OSError(errno.EIO, "I/O error", "a.bin"), "cannot use a.bin: I/O error"),
        (OSError(errno.EACCES, "No", "a.bin"), "cannot use a.bin: No; check the permissions"),
    ],
)
def test_the_output_is_blamed_for_what_a_write_can_answer(error, expected, monkeypatch, capsys):
    def main():
        raise error

    discarded = []
    monkeypatch.setattr(program, "_discard_output", lambda: discarded.append(True))
    assert program.run(main) == 1
    assert capsys.readouterr() == ("", f"error: {expected}\n")
    assert bool(discarded) == expected.startswith("cannot write")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("no such model"), 1),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1),
        (MemoryError("of 1 GiB"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_is_said_on_stdout_where_stderr_is_closed(error, status, monkeypatch, capsys):
    def main():
        program.note("the CPU is used")
        raise error

    monkeypatch.setattr(sys, "stderr", None)
    assert program.run(main) == status
    assert capsys.readouterr().out == ""
