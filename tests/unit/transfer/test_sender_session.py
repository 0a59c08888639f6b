"""A sender session hands out each page once, as soon as it is complete, and none after its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.errors import IllegalTransitionError
from cluster.spec.step_messages import Destination
from cluster.spec.transfer_messages import SendState
from tests.unit.transfer.samples import DECODE, PREFILL, ROOM
from transfer.page_assignment import PageShare
from transfer.sender import SenderSession

PAGE = 4


def _session(prompt_len: int, owned: range, *, held: int = 0, sends: bool = True) -> SenderSession:
    num_pages = -(-prompt_len // PAGE)
    target = Destination(
        decode=DECODE,
        ranks=[],
        num_tokens=prompt_len,
        pages=[[100 + i for i in range(held, num_pages)]],
        num_held_pages=held,
    )
    return SenderSession(
        room=ROOM,
        destination=target,
        prefill=PREFILL,
        sender_rank=1,
        page_size=PAGE,
        owned=owned,
        share=PageShare(1, frozenset({0} if sends else ())),
    )


@given(st.integers(1, 60), st.data())
def test_every_owned_page_is_sent_once_and_only_when_complete(prompt_len: int, data: st.DataObject) -> None:
    num_pages = -(-prompt_len // PAGE)
    held = data.draw(st.integers(0, num_pages))
    step = data.draw(st.integers(1, 3))
    owned = range(held, num_pages)[data.draw(st.integers(0, 2)) :: step]
    session = _session(prompt_len, owned, held=held)
    cuts = sorted(data.draw(st.lists(st.integers(0, prompt_len - 1), max_size=5)))
    sent: list[int] = []
    for computed in [*cuts, prompt_len]:
        complete = num_pages if computed == prompt_len else computed // PAGE
        pairs = session.advance([[7 * page for page in range(complete)]], computed)
        assert all(source // 7 == target - 100 for _, source, target in pairs)
        sent += [target - 100 for _, _, target in pairs]
        assert sent == [page for page in owned if page < complete]
        session.written(len(pairs), 10 * len(pairs))
        assert session.is_over == (computed == prompt_len)
    done = session.done()
    assert session.state is SendState.SENT
    assert done is not None
    assert (done.num_pages, done.num_bytes, done.sender_rank) == (len(owned), 10 * len(owned), 1)
    assert (done.room, done.decode_incarnation) == (ROOM, DECODE.incarnation)


def test_it_is_sent_only_when_the_last_write_is_acknowledged() -> None:
    session = _session(6, range(2))
    assert session.advance([[3]], 4) == [(0, 3, 100)]
    assert session.advance([[3, 9]], 6) == [(0, 9, 101)]
    session.written(1, 5)
    assert session.done() is None
    assert session.report().state is SendState.SENDING
    session.written(1, 5)
    assert session.report().state is SendState.SENT


def test_a_rank_that_owns_nothing_is_sent_at_the_last_chunk() -> None:
    dummy = _session(8, range(0), sends=False)
    assert dummy.advance([[1]], 4) == []
    assert not dummy.is_over
    assert dummy.advance([[1, 2]], 8) == []
    assert dummy.report().state is SendState.SENT
    assert dummy.done() is None
    empty = _session(8, range(0))
    empty.advance([[1, 2]], 8)
    done = empty.done()
    assert done is not None
    assert (done.num_pages, done.num_bytes) == (0, 0)


def test_a_cancelled_session_sends_nothing_and_ends_when_drained() -> None:
    session = _session(8, range(2))
    session.advance([[1]], 4)
    session.cancel()
    session.cancel()
    assert session.advance([[1, 2]], 8) == []
    assert session.report().state is SendState.DRAINING
    session.written(1, 5)
    assert not session.is_over
    session.drained()
    assert session.report().state is SendState.DRAINED
    assert session.done() is None
    session.failed("too late to matter")
    assert session.report().state is SendState.DRAINED


def test_a_failed_session_has_a_reason_and_sends_nothing() -> None:
    session = _session(8, range(2))
    session.advance([[1]], 4)
    session.failed("the wire is cut")
    assert session.advance([[1, 2]], 8) == []
    assert (session.report().state, session.report().reason) == (SendState.FAILED, "the wire is cut")
    session.cancel()
    session.drained()
    assert session.report().state is SendState.FAILED
    assert session.done() is None


def test_a_cancellation_that_ends_in_a_failure_is_a_failure() -> None:
    session = _session(8, range(2))
    session.advance([[1]], 4)
    session.cancel()
    session.failed("the wire is cut")
    assert session.report().state is SendState.FAILED


def test_a_cancellation_after_the_end_changes_nothing() -> None:
    session = _session(4, range(1))
    session.written(*(len(session.advance([[1]], 4)), 5))
    session.cancel()
    session.drained()
    assert session.state is SendState.SENT


def test_our_own_bugs_are_caught() -> None:
    with pytest.raises(AssertionError, match="more pages written"):
        _session(8, range(2)).written(1, 5)
    with pytest.raises(AssertionError, match="9 of 8 tokens"):
        _session(8, range(2)).advance([[1, 2]], 9)
    session = _session(4, range(1))
    session.written(*(len(session.advance([[1]], 4)), 5))
    with pytest.raises(IllegalTransitionError, match="sender of room 41"):
        session._move(SendState.DRAINING, "test")
