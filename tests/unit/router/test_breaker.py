"""A breaker opens after failures in a row, lets one request try, and is closed by the first success."""

from router.directory import Breakers, BreakerState
from tests.fakes.bootstrap import peer_of

PEER, OTHER = peer_of("decode-0"), peer_of("decode-1")


def opened() -> Breakers:
    """Opened at 1.0 for ten seconds."""
    breakers = Breakers(max_failures=2, open_s=10.0)
    breakers.fail(PEER, 0.0)
    breakers.fail(PEER, 1.0)
    return breakers


def test_it_opens_after_failures_in_a_row() -> None:
    breakers = Breakers(max_failures=2, open_s=10.0)
    for _ in range(3):
        breakers.fail(PEER, 0.0)
        assert breakers.allows(PEER, 0.0)
        breakers.succeed(PEER)
    breakers.fail(PEER, 0.0)
    breakers.fail(PEER, 0.0)
    assert breakers.state(PEER, 0.0) is BreakerState.OPEN
    assert not breakers.allows(PEER, 9.9)
    assert breakers.allows(OTHER, 0.0)


def test_a_single_request_tries_it() -> None:
    breakers = opened()
    assert breakers.state(PEER, 11.0) is BreakerState.HALF_OPEN
    assert breakers.allows(PEER, 11.0)
    breakers.begin(PEER, 11.0)
    assert not breakers.allows(PEER, 20.9)
    assert breakers.allows(PEER, 21.0)


def test_a_success_closes_it() -> None:
    breakers = opened()
    breakers.begin(PEER, 11.0)
    breakers.succeed(PEER)
    assert breakers.state(PEER, 11.0) is BreakerState.CLOSED
    breakers.fail(PEER, 12.0)
    assert breakers.allows(PEER, 12.0)


def test_one_failure_opens_it_again() -> None:
    breakers = opened()
    breakers.begin(PEER, 11.0)
    breakers.fail(PEER, 12.0)
    assert breakers.state(PEER, 21.9) is BreakerState.OPEN
    assert breakers.state(PEER, 22.0) is BreakerState.HALF_OPEN


def test_a_replica_that_starts_again_is_another_one() -> None:
    breakers = opened()
    assert breakers.allows(peer_of("decode-0", 2), 1.0)
    breakers.forget(PEER)
    assert breakers.allows(PEER, 1.0)
