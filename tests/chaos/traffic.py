"""Continuous clients of all kinds, and a count of their requests by outcome."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.chaos.streams import HUNG_S, Stream, end_of
from tests.fakes.recall_prompts import chain_prompt, recall_oracle

SHORT, LONG = (30, 800), (2_000, 12_000)
MOST_TOKENS = 60
NUM_SAMPLED = 6
"""Number of different sampled requests, so that each one is repeated."""
PAUSE_S = 0.3


@dataclass(frozen=True)
class Failure:
    """Request that did not end well, with the times at which it began and ended."""

    start_s: float
    end_s: float
    end: str

    def tell(self, begin_s: float) -> str:
        """Return the failure as one line, with times since another."""
        return f"{self.start_s - begin_s:.1f} to {self.end_s - begin_s:.1f} s: {self.end}"


class Traffic:
    """Number of requests by outcome: ``right``, ``left`` on purpose, ``away`` (no router), ``refused``, ``failed``,
    ``wrong``, ``hung``.
    """

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._sampled: dict[int, list[list[int]]] = {}
        """First answer to each seeded request."""
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.failures: list[Failure] = []

    @contextmanager
    def clients(self, number: int) -> Iterator[None]:
        """Run clients until the context ends and the last answer is complete."""
        self._ending.clear()
        threads = [threading.Thread(target=self._ask_on, args=[client], daemon=True) for client in range(number)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join(2 * HUNG_S)
            self.counts["hung"] += sum(thread.is_alive() for thread in threads)

    def _ask_on(self, client: int) -> None:
        draw = random.Random(f"{self._seed}-{client}")
        kinds: list[Callable[[random.Random], str]] = [self._stream, self._leave, self._whole, self._choices]
        while not self._ending.is_set():
            ask, start_s = draw.choice(kinds), time.monotonic()
            end = ask(draw)
            with self._lock:
                self.kinds[ask.__name__.lstrip("_")] += 1
                self.counts[end.partition(":")[0]] += 1
                if end not in ("right", "left"):
                    self.failures.append(Failure(start_s, time.monotonic(), end[:300]))
            self._ending.wait(draw.uniform(0, PAUSE_S))

    def _stream(self, draw: random.Random) -> str:
        stream = _make_stream(draw)
        stream.run(self._url)
        return stream.end

    def _leave(self, draw: random.Random) -> str:
        stream = _make_stream(draw)
        stream.patience_s = draw.uniform(0.05, 1.5)
        stream.run(self._url)
        return stream.end

    def _whole(self, draw: random.Random) -> str:
        num_tokens = draw.randint(1, MOST_TOKENS)
        length = max(_length(draw), 6 * num_tokens + 1)
        prompt = chain_prompt(length, (length - 1) // num_tokens, seed=draw.randrange(2**32))
        answer = self._post(prompt=prompt, max_tokens=num_tokens, temperature=0)
        return answer if isinstance(answer, str) else _compare(answer, [recall_oracle(prompt, num_tokens)])

    def _choices(self, draw: random.Random) -> str:
        """Return a seeded request's outcome. The same request always has the same answer."""
        number = draw.randrange(NUM_SAMPLED)
        prompt = [20 + number, *range(300, 500)]
        answer = self._post(prompt=prompt, max_tokens=20, temperature=1.5, n=1 + number % 3, seed=number)
        if isinstance(answer, str):
            return answer
        with self._lock:
            expected = self._sampled.setdefault(number, answer)
        return _compare(answer, expected)

    def _post(self, **fields: object) -> list[list[int]] | str:
        """Return the tokens of every choice, or the outcome."""
        body = {"model": "recall", "ignore_eos": True, "return_token_ids": True, **fields}
        try:
            reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=HUNG_S, trust_env=False)
        except httpx.ReadTimeout:
            return "hung"
        except httpx.ConnectError:
            return "away"
        except httpx.HTTPError as error:
            return f"failed: {type(error).__name__}"
        if reply.status_code != 200:
            return end_of(reply.status_code, reply.text)
        return [choice["token_ids"] for choice in reply.json()["choices"]]


def _make_stream(draw: random.Random) -> Stream:
    return Stream(draw.randint(1, MOST_TOKENS), draw.randrange(2**32), _length(draw))


def _length(draw: random.Random) -> int:
    return draw.randint(*(LONG if draw.random() < 0.2 else SHORT))


def _compare(found: list[list[int]], expected: list[list[int]]) -> str:
    return "right" if found == expected else f"wrong: {found}, not {expected}"
