"""What the leader's heartbeat says of its steps and sends."""

from cluster.spec.ids import Room
from cluster.spec.registry import SendTimes, StepTimes
from cluster.spec.step_messages import ScheduledRequest, SendReport, StepPlan, StepShape
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.transfer_messages import SendState
from workers.loop.rank_steps import StepMeter
from workers.scheduler.prefill_request import SendMeter

ROWS = [
    ScheduledRequest(
        room=Room(number), first_position=0, token_ids=[5] * number, new_pages=[], samples=False, output_position=0
    )
    for number in (3, 4)
]


def plan(strategy: Strategy, estimate_s: float | None, passing: Passing | None = None) -> StepPlan:
    return StepPlan(
        step=1,
        shape=StepShape(strategy=strategy, passing=passing),
        admits=[],
        scheduled=ROWS,
        releases=[],
        estimate_s=estimate_s,
    )


def test_steps_are_booked_by_strategy_and_passing() -> None:
    meter = StepMeter()
    meter.after_step(plan(Strategy.ZIGZAG, 1.0), 1.5)
    told = meter.times
    meter.after_step(plan(Strategy.ZIGZAG, 2.0), 1.75)
    meter.after_step(plan(Strategy.ZIGZAG, 0.25, Passing.PASS_Q), 0.5)
    assert [(times.num_steps, times.num_tokens, times.total_s) for times in told] == [(1, 7, 1.5)]
    assert meter.times == (
        StepTimes(
            strategy=Strategy.ZIGZAG,
            num_steps=2,
            num_tokens=14,
            total_s=3.25,
            total_estimate_s=3.0,
            last_s=1.75,
            last_estimate_s=2.0,
        ),
        StepTimes(
            strategy=Strategy.ZIGZAG,
            passing=Passing.PASS_Q,
            num_steps=1,
            num_tokens=7,
            total_s=0.5,
            total_estimate_s=0.25,
            last_s=0.5,
            last_estimate_s=0.25,
        ),
    )


def test_a_step_without_an_estimate_is_not_booked() -> None:
    meter = StepMeter()
    meter.after_step(plan(Strategy.NONE, None), 1.0)
    assert meter.times == ()


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
