"""Whoever judges chaos tells what is wrong: streams that hang, and endurance that proves nothing."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.judge import problems
from tests.chaos.random_faults import FIRST, KINDS
from tests.chaos.streams import Stream

TOKEN = b'data: {"choices": [{"token_ids": [%d]}]}\n\n'


def read(stream: Stream, *pieces: bytes) -> str:
    """How a stream ends that gets these, and then only word that the router lives."""

    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from pieces
            while True:
                yield b": waiting\n\n"
                time.sleep(0.001)

    return stream._read(httpx.Response(200, stream=Body()))


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_stream_without_data_hangs_though_the_router_says_that_it_lives(num_tokens: int) -> None:
    stream = Stream(3, seed=1, hung_s=0.05)
    assert read(stream, *(TOKEN % token for token in stream.expected[:num_tokens])) == "hung"
    assert len(stream.tokens) == num_tokens


def test_a_client_without_patience_leaves() -> None:
    assert read(Stream(3, seed=1, patience_s=0.05)) == "left"


@pytest.mark.parametrize(
    ("status", "text", "end"),
    [
        (503, "the bootstrap service has not answered yet", "away"),
        (503, "no prefill replica is ready", "failed: 503 no prefill replica is ready"),
        (429, "too many", "refused: 429 too many"),
    ],
)
def test_an_answer_of_a_router_that_knows_nothing_yet_is_none(status: int, text: str, end: str) -> None:
    stream = Stream(3, seed=1)
    assert stream._read(httpx.Response(status, text=text)) == end


HELD = {
    "descriptors": dict.fromkeys(("driver", "bootstrap", "router", "prefill-0 rank 0", "prefill-1 rank 0"), 20),
    "shared_memories": 4,
}
GROWN = {"mib": 700.0, "mib_a_minute": 0.2}
GOOD: dict[str, Any] = {
    "minutes": 30.0,
    "clients": 4,
    "requests": {"right": 900, "left": 200, "away": 50, "failed": 4},
    "faults": dict.fromkeys(KINDS, 5) | {FIRST: 1},
    "memory": dict.fromkeys(("driver", "router", "prefill-0 rank 0"), GROWN),
    "peak_mib": {"prefill-0 rank 0": 700.0, "prefill-1 rank 0": 800.0},
    "open_requests": 0,
    "waiting_requests": 0,
    "held_pages": 0,
    "quarantined_pages": 0,
    "before": HELD,
    "after": HELD,
}
NOT_SEEN = "did not live long enough to see whether it grows"


def test_a_run_in_which_all_went_well_has_no_problem() -> None:
    assert problems(GOOD) == []
    assert problems(GOOD | {"minutes": 5.0, "faults": {FIRST: 1}}) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"requests": {"failed": 4}}, ["no request was right"]),
        ({"requests": GOOD["requests"] | {"failed": 5}}, ["5 failed, of which the faults explain 4"]),
        ({"requests": GOOD["requests"] | {"wrong": 1, "hung": 2, "refused": 3}}, ["1 wrong", "2 hung", "3 refused"]),
        ({"faults": dict.fromkeys((FIRST, *KINDS[1:]), 1)}, [f"no {KINDS[0]}"]),
        ({"memory": {}}, [f"{name} {NOT_SEEN}" for name in GOOD["memory"]]),
        (
            {"memory": GOOD["memory"] | {"router": {"mib": 90.0, "mib_a_minute": 1.5}}},
            ["router grows by 1.5 MiB a minute"],
        ),
        (
            {"peak_mib": {"prefill-0 rank 0": 600.0, "prefill-1 rank 0": 800.0}},
            ["prefill-1 rank 0 had 800.0 MiB, prefill-0 rank 0 600.0"],
        ),
        ({"held_pages": 2, "quarantined_pages": 1}, ["2 held_pages", "1 quarantined_pages"]),
        (
            {"after": {"descriptors": {"driver": 29}, "shared_memories": 5}},
            ["driver has 29 descriptors, 20 at first", "5 shared memories, 4 at first"],
        ),
    ],
)
def test_each_problem_is_told(change: dict[str, Any], told: list[str]) -> None:
    assert problems(GOOD | change) == told


def test_a_run_that_did_nothing_is_no_good_run() -> None:
    nothing = GOOD | {"requests": {"failed": 5000, "away": 300}, "memory": {}, "faults": {}}
    assert problems(nothing)[:2] == ["no request was right", "5000 failed, of which the faults explain 0"]
    assert len(problems(nothing)) == 2 + len(KINDS) + 1 + len(GOOD["memory"])
