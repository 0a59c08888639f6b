"""What leaders say of the time that requests and transfers took."""

import pytest

from cluster.spec.ids import Room
from cluster.spec.messages import Message, Output
from cluster.spec.registry import PageFilter, SendTimes, TransferMode
from cluster.spec.step_messages import SendReport
from cluster.spec.transfer_messages import SendState
from tests.fakes.handoff import World
from workers.scheduler.send_meter import SendMeter


def test_sends_are_summed_by_rank() -> None:
    meter = SendMeter()
    for rank, num_bytes, write_s in ((1, 10, 0.5), (0, 4, 0.25), (1, 20, 0.5), (2, 0, 0.0)):
        meter.add(
            SendReport(
                room=Room(1), generation=1, sender_rank=rank, state=SendState.SENT, num_bytes=num_bytes, write_s=write_s
            )
        )
    assert meter.times == (
        SendTimes(global_rank=0, num_transfers=1, num_bytes=4, write_s=0.25),
        SendTimes(global_rank=1, num_transfers=2, num_bytes=30, write_s=1.0),
    )


def test_the_first_output_tells_how_long_each_phase_took(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(
        seed=1,
        cp=2,
        mode=TransferMode.ALL_RANKS,
        page_filter=PageFilter.MODULAR,
        num_pages=8,
        chunk_tokens=4,
    )
    told: list[Output] = []
    reply = world._reply

    def note(message: Message) -> None:
        told.extend([message] if isinstance(message, Output) else [])
        reply(message)

    monkeypatch.setattr(world, "_reply", note)
    world.submit(list(range(1, 11)), max_tokens=3)
    while world.act():
        world.now_s += 1.0
    first, *others = told
    assert [output.phases for output in others] == [None, None]
    phases = first.phases
    assert phases is not None
    assert (phases.prefill, phases.decode) == ("prefill-0", "decode-0")
    times = (phases.decode_queue_s, phases.bootstrap_s, phases.prefill_s, phases.transfer_s)
    assert all(seconds >= 0 and seconds == int(seconds) for seconds in times), "whole events have passed"
    assert phases.prefill_s >= 2, "three chunks are two steps apart at least"
    assert phases.decode_queue_s + phases.bootstrap_s + phases.prefill_s + phases.transfer_s <= 2 * world.now_s
