"""Clients of a whole cluster that check every streamed token."""

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx

from tests.fakes.recall_prompts import needle_prompt, recall_oracle

NEEDLE_TOKENS = 10
"""Length of an answer."""
PAUSE_S = 0.1
"""Pause between a client's requests, so that a small machine has time for the tested actions."""


async def crowd(
    url: str, num_clients: int, seed: int, leavers: int, after_s: tuple[float, int, int] | None = None
) -> list[str]:
    """Return every client's outcome. ``after_s`` sends a signal to a process after a number of seconds.

    Crowds with different seeds have different prompts, so that no cache answers for them.
    """
    rng = random.Random(seed)
    leaving = set(rng.sample(range(num_clients), leavers))
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=num_clients)) as client:
        jobs = [
            asyncio.create_task(
                one_client(client, url, rng.choice([20, 100, 700, 3000, 8000]), 1000 * seed + index, index in leaving)
            )
            for index in range(num_clients)
        ]
        if after_s is not None:
            await asyncio.sleep(after_s[0])
            os.kill(after_s[1], after_s[2])
        return await asyncio.gather(*jobs)


async def one_client(client: httpx.AsyncClient, url: str, length: int, seed: int, leaves: bool) -> str:
    """Return ``right`` if every token is, ``left`` if the client disconnected, or ``failed`` if the router said so."""
    prompt = needle_prompt(length, (seed % 5) / 4, seed=seed)
    body = {
        "model": "recall",
        "prompt": prompt,
        "max_tokens": NEEDLE_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return "failed" if answer.status_code >= 500 else f"status {answer.status_code}"
        async for line in answer.aiter_lines():
            if leaves and len(tokens) >= seed % NEEDLE_TOKENS:
                return "left"
            if line.startswith('data: {"error"'):
                return "failed"
            if line.startswith("data: {"):
                tokens += _token_ids(line)
    return "right" if tokens == recall_oracle(prompt, NEEDLE_TOKENS) else "wrong"


def _token_ids(line: str) -> list[int]:
    event: dict[str, Any] = httpx.Response(200, content=line.removeprefix("data: ")).json()
    return [token for choice in event["choices"] for token in choice.get("token_ids", [])]


@contextmanager
def streaming_clients(url: str, num_clients: int) -> Iterator[list[str]]:
    """Run clients that send request after request. Yield the list of their outcomes from ``one_client``."""
    outcomes: list[str] = []
    stopped = threading.Event()

    async def ask(first_seed: int) -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            for seed in count(first_seed, num_clients):
                if stopped.is_set():
                    return
                outcomes.append(await one_client(client, url, 100 + seed * 97 % 700, seed, leaves=False))
                await asyncio.sleep(PAUSE_S)

    async def ask_all() -> None:
        await asyncio.gather(*(ask(number) for number in range(num_clients)))

    thread = threading.Thread(target=asyncio.run, args=(ask_all(),))
    thread.start()
    try:
        yield outcomes
    finally:
        stopped.set()
        thread.join()
