"""Signals that ask for an end: kept, counted, and answered at once where that is wished."""

import os
import pty
import signal
import sys
import threading
import weakref

import pytest

from expt import signals
from tests.facade import Capture, Patch


@pytest.fixture(autouse=True)
def _in_command(monkeypatch: Patch) -> None:
    """Heed signals as a command does, and not a call from Python."""
    monkeypatch.setattr(signals, "_in_command", True)
    monkeypatch.setattr(signals, "_interrupted", False)  # by a command in this process before


@pytest.fixture(autouse=True)
def _own_handlers(own_handlers: None, monkeypatch: Patch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def press(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", signals.ASKING)
def test_the_first_signal_is_kept(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with signals.Heeded():
        assert not signals.asked()
        press(number)
        assert signals.asked()
        assert signals.asked_by(number)
        is_of_person = number == signal.SIGINT  # who is less patient than a scheduler
        assert signals.grace_s() == (signals.IMPATIENT_S if is_of_person else signals.GRACE_S)
    assert signal.getsignal(number) is before
    assert signals.exit_code() == 128 + number


def test_dropped_ctrl_c_ends_the_run_without_traceback(monkeypatch: Patch) -> None:
    """As where it comes within a callback: an import has some."""
    dropped = list[object]()
    monkeypatch.setattr(signals, "_interrupted", False)
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))
    watched, watched_too, before = (
        threading.Event(),
        threading.Event(),
        signal.getsignal(signal.SIGINT),
    )
    with signals.interrupts_noted():
        called = weakref.ref(watched, lambda _: press(signal.SIGINT))
        del watched
        assert called() is None
        assert signals.was_interrupted()
        assert dropped == []
        other = weakref.ref(watched_too, lambda _: 1 / 0)
        del watched_too
        assert (other(), dropped) == (None, [ZeroDivisionError]), "what else is dropped is told"
        with pytest.raises(KeyboardInterrupt), signals.Heeded():
            raise AssertionError
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_raises() -> None:
    with signals.Heeded():
        press(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            press(signal.SIGINT)
    assert signals.exit_code() == 143  # the first counts


def test_the_end_of_the_terminal_may_be_told_twice() -> None:
    """By the shell, and by the system."""
    with signals.Heeded():
        press(signal.SIGHUP)
        press(signal.SIGHUP)
        assert signals.grace_s() == signals.GRACE_S
    assert signals.exit_code() == 129


def test_nohup_keeps_its_meaning() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.Heeded():
        press(signal.SIGHUP)
        assert not signals.asked()
    signals.heed_in_worker()
    press(signal.SIGHUP)
    assert not signals.asked()


def test_what_is_printed_to_a_terminal_that_is_gone_goes_nowhere(capfd: Capture) -> None:
    master, slave = pty.openpty()
    kept = os.dup(1)
    try:
        os.dup2(slave, 1)
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(1, b"x")
        with signals.Heeded():
            press(signal.SIGHUP)
        os.write(1, b"x")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(slave)
    with signals.Heeded():
        press(signal.SIGHUP)
    os.write(1, b"a file keeps what is printed")
    assert capfd.readouterr().out == "a file keeps what is printed"


def test_where_nothing_can_wait_the_first_raises() -> None:
    with signals.Heeded():
        with signals.heeded_at_once(), pytest.raises(KeyboardInterrupt):
            press(signal.SIGINT)
        signals._received.clear()
        press(signal.SIGINT)  # from here on it is kept again


def test_what_was_heard_in_an_earlier_run_is_forgotten() -> None:
    with signals.Heeded():
        press(signal.SIGUSR1)
    with signals.Heeded():
        assert not signals.asked()
        assert signals.exit_code() == 130, "without a signal that of Ctrl-C"


def test_in_another_thread_handlers_stay_as_they_are() -> None:
    before, during = signal.getsignal(signal.SIGTERM), list[object]()

    def heed() -> None:
        with signals.Heeded():
            during.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=heed)
    thread.start()
    thread.join()
    assert during == [before]


def test_a_worker_without_a_driver_heeds_whoever_started_it() -> None:
    signals.heed_in_worker()
    for number in (signals.ASK_WORKER, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
        press(number)
        assert signals.asked_by(number)


def test_a_new_worker_has_not_been_asked() -> None:
    signals._received.append(signal.SIGINT)
    signals.heed_in_worker()
    assert not signals.asked()
