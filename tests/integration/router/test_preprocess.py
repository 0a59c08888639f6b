"""Bodies that take too much work end their own request, and only that one."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.spec.wire import TokenIds
from router.errors import ApiError
from router.page_index import LONG_TOKENS, PromptKeys
from router.preprocess import pool as pool_module
from router.preprocess.job import Job, JsonText, Outcome, Preprocessed, Route, encode
from router.preprocess.model import read_model
from router.preprocess.pool import PreprocessPool, _Process
from router.preprocess.preprocessor import preprocess
from tests.chaos.faults import kill
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import MODEL, config_of

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 1 << 20
PATTERNS = {"allOf": [{"type": "string", "pattern": f"(.*a{number}.*)"} for number in range(16)]}
MANY = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(10_000)}}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "automaton": ({"guided_json": PATTERNS}, "takes more than 0.5 s to compile; allowed: a simpler one"),
    "conversion": ({"guided_grammar": "root ::= " + "\n" * 50_000 + '"a"'}, "takes more than 0.5 s to compile"),
    "properties": ({"guided_json": MANY}, "takes more than 0.5 s to compile"),
    "text": ({"prompt": "a b c d " * 3_000_000}, f"24000000 characters; allowed: at most {16 * CONTEXT}"),
    "rules": (
        {"prompt": [[5]] * 64, "guided_json": {"type": "integer", "description": "x" * 1_000_000}},
        "grammar: got 64 choices with 1000",
    ),
    "stops": ({"stop": ["x" * 1025]}, "stop: "),
    "bad words": ({"bad_words": ["x" * 257]}, "bad_words[0]: "),
    "stop ids": ({"stop_token_ids": [1] * 1025}, "stop_token_ids: must have at most 1024 items"),
    "salt": ({"cache_salt": "x" * 1025}, "cache_salt: "),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), max_context=CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(folder: Path) -> AsyncIterator[PreprocessPool]:
    made = new_pool(folder)
    async with served(made):
        yield made


def new_pool(folder: Path) -> PreprocessPool:
    config = config_of()
    return PreprocessPool(config, folder, read_model(config, folder))


@asynccontextmanager
async def served(pool: PreprocessPool) -> AsyncIterator[None]:
    serving = asyncio.create_task(pool.serve())
    yield
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def job(route: Route = Route.COMPLETIONS, *, with_keys: bool = False, **fields: Any) -> Job:
    body = json.dumps({"model": MODEL} | fields).encode()
    return Job(route=route, body=body, max_tokens=CONTEXT, with_keys=with_keys)


@pytest.mark.parametrize("name", HOSTILE)
async def test_excess_is_refused_and_the_pool_goes_on(pool: PreprocessPool, name: str) -> None:
    fields, words = HOSTILE[name]
    with pytest.raises(ApiError) as caught:
        await pool.run(job(**({"prompt": "a"} | fields)), "mallory")
    assert caught.value.status == 400
    assert words in str(caught.value)
    made = await pool.run(job(prompt="a", guided_regex="[ab]"), "alice")
    assert isinstance(made, Preprocessed)


async def test_a_process_has_the_same_outcome_as_the_router(pool: PreprocessPool) -> None:
    asked = [
        job(prompt="abc", n=2, stop=["x", "yz"], echo=True, logprobs=2, logit_bias={"5": 1.5}, user="u", seed=3),
        job(prompt=[[5, 6], [7, 8, 9]], bad_words=["bad"], min_tokens=2, priority=4, return_token_ids=True, seed=3),
        job(Route.CHAT, messages=[{"role": "user", "content": "hello"}], include_reasoning=False, stream=True, seed=3),
        job(Route.RESPONSES, input="hello", instructions="be", metadata={"a": "b"}, temperature=0.5, seed=3),
        job(Route.TOKENIZE, prompt="hello", return_token_strs=True),
        job(Route.DETOKENIZE, tokens=[5, 6, 7]),
    ]
    for one in asked:
        inline = pool.run_inline(one)
        assert inline is not None
        assert encode(await pool.run(one, "alice")) == encode(inline)
    long: list[dict[str, Any]] = [
        {"prompt": "a" * 5000},
        {"prompt": "a", "guided_regex": "a"},
        {"prompt": [5] * 40_000},
        {"prompt": [[5]] * 40},
        {"prompt": "a", "bad_words": ["a"] * 40},
    ]
    assert [pool.run_inline(job(**fields)) for fields in long] == [None] * len(long)


async def test_a_job_tokenizes_its_words_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, words = read_model(config_of(), folder), []
    real = model.tokenizer.encode

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        words.append(text)
        return real(text, add_special_tokens)

    monkeypatch.setattr(model.tokenizer, "encode", encode)
    made = preprocess(model, job(prompt=[[5], [6], [7]], bad_words=["bad"]))
    assert isinstance(made, Preprocessed)
    assert words == ["bad", " bad"]
    assert len({request.sampling.seed for request in made.requests}) == 3


async def test_arguments_that_are_nested_too_deeply_are_text(pool: PreprocessPool) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 1500}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "a"}]
    made = await pool.run(job(Route.CHAT, messages=messages), "alice")
    assert isinstance(made, Preprocessed)


def children() -> list[int]:
    """Return the preprocessing processes of this process."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, found) if b"router.preprocess.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_processes_that_were_killed_while_idle_are_replaced(pool: PreprocessPool) -> None:
    await asyncio.gather(*(pool.run(job(prompt="a"), "alice") for _ in range(8)))
    for pid in children():
        kill("a preprocessing process", pid)
    made = await asyncio.gather(*(pool.run(job(prompt="a"), "alice") for _ in range(8)))
    assert [type(each) for each in made] == [Preprocessed] * 8


def hang_at(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Let the processes never answer a message that contains a text."""
    real = _Process.call

    async def call(process: _Process, message: bytes) -> Outcome | None:
        if text in message:
            await asyncio.Event().wait()
        return await real(process, message)

    monkeypatch.setattr(_Process, "call", call)


async def test_the_longest_bodies_of_a_tenant_leave_a_process_to_others(
    pool: PreprocessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_at(monkeypatch, b"endless")
    hanging = [asyncio.create_task(pool.run(job(prompt="endless"), "mallory")) for _ in range(5)]
    for _ in range(5):
        assert isinstance(await asyncio.wait_for(pool.run(job(prompt="a"), "alice"), 60), Preprocessed)
    assert not any(each.done() for each in hanging)
    await cancelled(hanging)


async def cancelled(tasks: list[asyncio.Task[Preprocessed | JsonText]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_job_ends_soon_after_its_client_has_left(pool: PreprocessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_at(monkeypatch, b"endless")
    monkeypatch.setattr("router.preprocess.pool._LEFT_S", 0.1)
    for _ in range(3):
        hanging = asyncio.gather(*(pool.run(job(prompt="endless"), "mallory") for _ in range(3)))
        await asyncio.sleep(0.2)
        hanging.cancel()
    assert isinstance(await asyncio.wait_for(pool.run(job(prompt="a"), "mallory"), 50), Preprocessed)


@pytest.mark.parametrize("program", ["exit 1", "exec sleep 600", None])
async def test_jobs_fail_while_no_process_can_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    python, stub, wall_s = sys.executable, tmp_path / "program", pool_module._WALL_S
    if program is not None:
        stub.write_text(f"#!/bin/sh\n{program}\n")
        stub.chmod(0o700)
    monkeypatch.setattr("router.preprocess.pool._WALL_S", 0.5)
    monkeypatch.setattr("router.preprocess.pool._RETRY_S", 0.05)
    monkeypatch.setattr("router.preprocess.pool.NUM_PROCESSES", 1)
    monkeypatch.setattr(sys, "executable", str(stub))
    made = new_pool(folder)
    async with served(made):
        with pytest.raises(ApiError, match="cannot start the process that reads this request; try again") as caught:
            await made.run(job(prompt="a"), "alice")
        assert caught.value.status == 503
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.setattr("router.preprocess.pool._WALL_S", wall_s)
        assert isinstance(await asyncio.wait_for(_until_served(made), 60), Preprocessed)


async def _until_served(pool: PreprocessPool) -> Preprocessed | JsonText:
    while True:
        with suppress(ApiError):
            return await pool.run(job(prompt="a"), "alice")


async def test_the_keys_of_a_long_prompt_come_with_it(pool: PreprocessPool) -> None:
    ids = [5, 6, 7, 8] * (LONG_TOKENS // 4) + [9]
    made = await pool.run(job(prompt=ids, cache_salt="s", with_keys=True), "alice")
    assert isinstance(made, Preprocessed)
    assert made.requests[0].prompt_ids == TokenIds.of(ids)
    assert made.page_keys == [PromptKeys(TokenIds.of(ids), config_of().kv.page_size, "s").all()]


async def test_long_texts_do_not_pass_through_the_router(pool: PreprocessPool) -> None:
    text = "a b c d " * 10_000
    made = await pool.run(job(Route.TOKENIZE, prompt=text), "alice")
    assert isinstance(made, JsonText)
    assert json.loads(made.text)["count"] > 1000


async def test_only_so_many_bodies_wait_and_a_flood_is_dropped_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.preprocess.pool.MAX_WAITING", 6)
    monkeypatch.setattr("router.preprocess.pool.NUM_PROCESSES", 1)
    made = new_pool(folder)
    alice, *mallory = (asyncio.create_task(made.run(job(prompt="a"), tenant)) for tenant in ["alice", *["mallory"] * 9])
    dropped, waiting = await asyncio.wait(mallory, timeout=0.2)
    said = {str(task.exception()) for task in dropped}
    assert (len(dropped), said) == (4, {"6 requests wait to be read, most of them with this key; try again"})
    async with served(made):
        assert all(isinstance(outcome, Preprocessed) for outcome in await asyncio.gather(alice, *waiting))


async def test_waiting_jobs_fail_when_the_router_stops(folder: Path) -> None:
    made = new_pool(folder)
    async with served(made):
        waiting = [asyncio.create_task(made.run(job(prompt="a b c d " * 1000), "alice")) for _ in range(3)]
        await asyncio.sleep(0.1)
    waiting.append(asyncio.create_task(made.run(job(prompt="a"), "alice")))  # from a connection that is still open
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10.0)
    assert [str(outcome) for outcome in outcomes] == ["the router is stopping"] * 4
