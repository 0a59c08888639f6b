"""Packed token ids behave like any other sequence, and messages accept nothing else."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.channel import decode, encode
from cluster.spec.ids import ROUTER, Incarnation, Peer, Room
from cluster.spec.kv import page_keys
from cluster.spec.messages import Submit
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
INDICES = st.none() | st.integers(-25, 25)
PEER = Peer(replica=ROUTER, incarnation=Incarnation(1), address="tcp://r:1")


def frame_of(prompt_ids: Any) -> bytes:
    submit = Submit(
        room=Room(1),
        prompt_ids=prompt_ids,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        prefill=None,
        decode=PEER,
        router=PEER,
    )
    return encode(submit)


@given(IDS, IDS, INDICES, INDICES, st.sampled_from([None, 1, 2, -1]))
def test_token_ids_equal_a_list(
    ids: list[int], others: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    packed = TokenIds.of(ids)
    assert [*packed] == ids
    assert len(packed) == len(ids)
    assert [*packed[start:stop:step]] == ids[start:stop:step]
    assert [packed[index] for index in range(-len(ids), len(ids))] == [*ids, *ids]
    assert [*(packed + others)] == ids + others
    assert (packed == TokenIds.of(others)) == (ids == others)
    assert page_keys(packed, 3, "salt") == page_keys(ids, 3, "salt")


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_beyond_the_end_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        TokenIds.of([1, 2])[index]


@pytest.mark.parametrize("wrong", [-(2**31) - 1, 2**31])
def test_ids_that_cannot_be_packed_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="allowed: -2147483648 to 2147483647"):
        TokenIds.of([1, wrong])


@given(IDS)
def test_they_travel_as_bytes(ids: list[int]) -> None:
    frame = frame_of(TokenIds.of(ids))
    message = decode(frame)
    assert isinstance(message, Submit)
    assert [*message.prompt_ids] == ids
    assert struct.pack(f"<{len(ids)}i", *ids) in frame


@pytest.mark.parametrize("wrong", [b"abc", [1, 2], "abcd", None])
def test_partial_ids_are_refused(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(frame_of(wrong))
