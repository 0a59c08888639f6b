"""Signals while the driver starts: noted, told once, and raised only where that was asked for."""

import queue
import signal
from collections.abc import Iterator

import pytest

from cluster.cli.stop_signals import StopSignals

WAIT_S = 60.0


@pytest.fixture
def reports() -> "queue.SimpleQueue[str]":
    return queue.SimpleQueue()


@pytest.fixture
def signals(reports: "queue.SimpleQueue[str]") -> Iterator[StopSignals]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield StopSignals(reports.put)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_noted_until_the_next_check(
    signals: StopSignals, reports: "queue.SimpleQueue[str]", number: signal.Signals
) -> None:
    signals.check()
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert reports.get(timeout=WAIT_S) == number.name
    with pytest.raises(KeyboardInterrupt):
        signals.check()
    assert reports.empty()


def test_raised_at_once_only_where_that_harms_nothing(signals: StopSignals) -> None:
    with pytest.raises(KeyboardInterrupt), signals.interrupting():
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.pass_on(lambda _: None)


def test_passed_on_each_time_and_again_after_somebody_else_put_handlers(signals: StopSignals) -> None:
    told: list[str] = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.pass_on(told.append)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert told == ["SIGTERM", "SIGINT"]


def test_a_second_signal_is_final_where_nothing_has_to_be_ended(signals: StopSignals) -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    signals.leave_at_second(left.put)
    signal.raise_signal(signal.SIGINT)
    assert left.empty()
    signal.raise_signal(signal.SIGTERM)
    assert left.get(timeout=WAIT_S) == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signals.pass_on(lambda _: None)
    signal.raise_signal(signal.SIGINT)
    assert left.empty()
