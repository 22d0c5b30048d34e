"""How the programs answer Ctrl-C."""

import os
import signal

import pytest

from numbagpt import cli


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_asks_for_a_stop_and_the_second_stops(capfd):
    before = signal.getsignal(signal.SIGINT)
    with cli.Interrupt("stopping") as interrupt:
        items = interrupt.watch("abc")
        assert next(items) == "a"
        interrupt.check()
        ctrl_c()
        assert capfd.readouterr() == ("", "stopping\n")
        with pytest.raises(cli.Stopped):
            next(items)
        with pytest.raises(cli.Stopped):
            interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_that_is_ignored_stays_so(capfd):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli.Interrupt("stopping") as interrupt:
            ctrl_c()
            interrupt.check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr() == ("", "")
