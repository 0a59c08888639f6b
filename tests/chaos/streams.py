"""Clients that stream answers with known tokens, and their outcomes."""

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from tests.fakes.recall_prompts import LINK_LEN, chain_prompt, recall_oracle

HUNG_S = 90.0
"""Time without data after which a stream counts as hung."""
REFUSALS = (400, 413, 429)
"""Statuses of requests that are refused, for now or for good."""
NEW_ROUTER = "the bootstrap service has not answered yet"


@dataclass
class Stream:
    """One client's request. Its prompt is a chain, and each link is a token of the answer."""

    num_tokens: int
    seed: int
    prompt_len: int = 0
    """Prompt length in tokens. By default, the length of the chain."""
    patience_s: float = math.inf
    """Time after which the client disconnects."""
    hung_s: float = HUNG_S
    """Time without data after which the stream counts as hung. Keep-alive comments are no data."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling fields. With them, the expected answer comes from `again` instead of the model's rule."""
    tokens: list[int] = field(default_factory=list)
    longest_pause_s: float = 0.0
    """Longest pause between two tokens."""
    end: str = ""
    """Outcome: ``right``, ``left``, ``hung``, ``refused``, ``away`` (no router yet), an error, or "" before the end."""
    retry_after: str | None = None
    """Header of a response that is not a stream."""
    decode: str = ""
    """Replica that began to decode."""

    def __post_init__(self) -> None:
        num_tokens = max(self.prompt_len, self.num_tokens * LINK_LEN + 1)
        self.prompt = chain_prompt(num_tokens, (num_tokens - 1) // self.num_tokens, seed=self.seed)
        self.expected = recall_oracle(self.prompt, self.num_tokens)

    def again(self) -> "Stream":
        """Return the same request, with these tokens as the expected answer."""
        assert len(self.tokens) == self.num_tokens, self.end
        other = Stream(self.num_tokens, self.seed, self.prompt_len, sampling=self.sampling)
        other.expected = self.tokens
        return other

    def run(self, url: str) -> None:
        """Send the request, and read the answer to its end."""
        body = {"model": "recall", "prompt": self.prompt, "max_tokens": self.num_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, **self.sampling}
        try:
            timeout = httpx.Timeout(self.hung_s, read=min(self.patience_s, self.hung_s))
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout, trust_env=False) as reply:
                self.end = self._read(reply)
        except httpx.ConnectError:
            self.end = "away"
        except httpx.ReadTimeout:
            self.end = "left" if self.patience_s < self.hung_s else "hung"
        except httpx.HTTPError as error:
            self.end = f"failed: {type(error).__name__}"

    def _read(self, reply: httpx.Response) -> str:
        if reply.status_code != 200:
            self.retry_after = reply.headers.get("retry-after")
            return end_of(reply.status_code, reply.read().decode())
        self.decode = reply.headers.get("x-baton-decode", "")
        last_s = start_s = time.monotonic()
        for line in reply.iter_lines():
            if time.monotonic() > start_s + self.patience_s:
                return "left"
            if time.monotonic() > last_s + self.hung_s:
                return "hung"
            if line.startswith('data: {"error"'):
                return f"failed: {line}"
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                self.tokens += [token for choice in choices for token in choice.get("token_ids", [])]
                now_s = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
                last_s = now_s
        return "right" if self.tokens == self.expected else f"wrong: {self.tokens}, not {self.expected}"


def end_of(status: int, text: str) -> str:
    """Return the outcome of a response with a status other than 200."""
    if NEW_ROUTER in text:
        return "away"
    return f"{'refused' if status in REFUSALS else 'failed'}: {status} {text}"


class Crowd:
    """Several streams in parallel, each in a thread. Leaving the context waits for their ends."""

    def __init__(self, url: str, streams: Sequence[Stream]) -> None:
        self.streams = streams
        self._threads = [threading.Thread(target=stream.run, args=[url], daemon=True) for stream in self.streams]

    @classmethod
    def alike(cls, url: str, num_clients: int, num_tokens: int, seed: int, prompt_len: int = 0) -> Self:
        """Return clients with answers of one length."""
        return cls(url, [Stream(num_tokens, seed + number, prompt_len) for number in range(num_clients)])

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.join(2 * HUNG_S)

    def have_tokens(self, count: int) -> bool:
        """Return whether every stream has a number of tokens or has ended."""
        return all(stream.end or len(stream.tokens) >= count for stream in self.streams)

    def count(self, end: str) -> int:
        """Return the number of streams with this outcome. Unfinished ones are ``hung``."""
        return sum((stream.end or "hung").startswith(end) for stream in self.streams)
