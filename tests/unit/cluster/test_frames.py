"""Frames are plain MessagePack: another library decodes the same values."""

import struct
from typing import Any

import msgpack
import msgspec
import pytest

from cluster.channel import decode, encode
from cluster.spec.ids import ROUTER, Incarnation, Peer, Room
from cluster.spec.messages import Message, Output, Submit
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds, from_wire
from tests.fuzz.samples import messages

PEER = Peer(replica=ROUTER, incarnation=Incarnation(1), address="tcp://r:1")


def read(frame: bytes) -> Any:
    """Decode a frame with the msgpack package."""
    return msgpack.unpackb(frame, use_list=False, strict_map_key=False)


@pytest.mark.parametrize("message", messages(), ids=lambda message: type(message).__name__)
def test_every_message_is_read_by_another_library(message: Message) -> None:
    tree = read(encode(message))
    assert tree["type"] == type(message).__name__
    assert msgspec.convert(tree, type(message), dec_hook=from_wire) == message


def test_token_ids_are_four_bytes_each() -> None:
    ids = [0, 1, 300, 2**31 - 1]
    submit = Submit(
        room=Room(2**63 - 1),
        prompt_ids=TokenIds.of(ids),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        prefill=None,
        decode=PEER,
        router=PEER,
    )
    tree = read(encode(submit))
    assert tree["prompt_ids"] == struct.pack("<4i", *ids)
    assert tree["room"] == 2**63 - 1
    assert tree["decode"]["address"] == PEER.address


def test_frames_of_another_library_are_decoded() -> None:
    tree = {
        "type": "Output",
        "room": 7,
        "replica": "decode-0",
        "incarnation": 1,
        "first_index": 0,
        "token_ids": [5, 6],
        "finish": None,
    }
    message = decode(msgpack.packb(tree))
    assert isinstance(message, Output)
    assert (message.room, message.token_ids) == (Room(7), [5, 6])
