"""Requests and connections of a hostile client: ``python -m tests.chaos.hostile URL NAME`` prints the answer.

They run in a process of their own, because making large bodies would delay the clients of the test.
"""

import asyncio
import json
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from cluster.bench.endpoint import key_headers

WAIT_S = 90.0
HEADER_BYTES = 131 << 20
NUM_BODIES = 300
SPARE_DESCRIPTORS, HOLD_S = 100, 5.0
FLOOD_REQUESTS, FLOOD_PROMPT_LEN = 1000, 300
LIMITS = httpx.Limits(max_connections=FLOOD_REQUESTS)
_PATTERNS = {"allOf": [{"type": "string", "pattern": f"(.*a{number}.*)"} for number in range(16)]}
_MANY = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(10_000)}}
_LONG = {"type": "integer", "description": "x" * 1_000_000}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 1500}}

BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "a long text": lambda: {"prompt": "a b c d " * 1_000_000},
    "a text of 500,000 tokens": lambda: {"prompt": "t33 t34 t35 t36 " * 125_000},
    "a text of 60 MB": lambda: {"prompt": "a b c d " * 7_500_000},
    "messages of 60 MB": lambda: {"messages": [{"role": "user", "content": "x" * 60_000_000}]},
    "a GBNF grammar of empty lines": lambda: {"prompt": "a", "guided_grammar": "root ::= " + "\n" * 50_000 + '"a"'},
    "an exponential automaton": lambda: {"prompt": "a", "guided_json": _PATTERNS},
    "10,000 properties": lambda: {"prompt": "a", "guided_json": _MANY},
    "a schema of 60 MB": lambda: {"prompt": "a", "guided_json": {"enum": ["x" * 1000] * 60_000}},
    "long bad words": lambda: {"prompt": "a", "bad_words": ["x y" * 16_000] * 256},
    "4,000,000 unknown keys": lambda: {"prompt": "a", **{f"k{number}": 1 for number in range(4_000_000)}},
    "an unknown field of 3 MB": lambda: {"prompt": "a", "foo": [{"a": 1}] * 300_000},
    "1,024 long prompts": lambda: {"prompt": ["a b " * 1000] * 1024, "max_tokens": 1},
    "1,024 choices": lambda: {"prompt": [[20, 21]] * 8, "n": 128, "max_tokens": 1},
    "prompts in 1,024 choices": lambda: {"prompt": [[33] * 2000] * 8, "n": 128, "max_tokens": 1, "echo": True},
    "7,000,000 stop tokens": lambda: {"prompt": "a", "stop_token_ids": [5] * 7_000_000},
    "a prompt of 500,000 ids": lambda: {"prompt": [33] * 500_000},
    "bad words of 700 prompts": lambda: {"prompt": [[5]] * 700, "bad_words": ["a"] * 256},
    "biases of 1,024 prompts": lambda: {"prompt": [[5]] * 1024, "logit_bias": {str(i): 1 for i in range(4096)}},
    "a schema of 1 MB for 1,024 prompts": lambda: {"prompt": [[5]] * 1024, "guided_json": _LONG},
    "log-probabilities of 128 choices": lambda: {
        "messages": [{"role": "user", "content": "a"}],
        "n": 128,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 300,
        "ignore_eos": True,
    },
    "deeply nested arguments": lambda: {"messages": [{"role": "assistant", "tool_calls": [_CALL]}]},
    "deep nesting": lambda: {"prompt": "a", "foo": json.loads("[" * 900 + "]" * 900)},
}


def attack_command(url: str, name: str) -> list[str]:
    """Return the command that carries out an attack in a process of its own and prints the answer."""
    return [sys.executable, "-m", "tests.chaos.hostile", url, name]


def send_body(url: str, name: str) -> str:
    made = BODIES[name]()
    path = "/v1/chat/completions" if "messages" in made else "/v1/completions"
    body = json.dumps({"model": "recall", "max_tokens": 1, **made})
    try:
        reply = httpx.post(f"{url}{path}", content=body, timeout=WAIT_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}"
    return f"{reply.status_code} {reply.text}"


def send_endless_header(url: str) -> str:
    """Send one header line without an end, and return the answer."""
    with _connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with suppress(ConnectionError):
            for _ in range(HEADER_BYTES >> 20):
                sock.sendall(b"x" * (1 << 20))
        return _answer(sock)


def hold_bodies(url: str) -> str:
    """Open connections with a complete head whose body never comes, and return the answer to the last one."""
    open_ones = [_connect(url) for _ in range(NUM_BODIES)]
    for sock in open_ones:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
    answers = [_answer(sock) for sock in open_ones]
    for sock in open_ones:
        sock.close()
    return min(answers)


def hold_idle_connections(url: str) -> str:
    """Open as many connections as a process may, send nothing, and return the answer to a request on one more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_ones = [_connect(url) for _ in range(limit - SPARE_DESCRIPTORS)]
    try:
        time.sleep(HOLD_S)
        with _connect(url) as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return _answer(sock)
    finally:
        for sock in open_ones:
            sock.close()


def flood(url: str) -> str:
    """Send many requests at once with the key in ``BATON_API_KEY``; return the seconds until all are answered."""

    async def ask(http: httpx.AsyncClient) -> int:
        body = {"model": "recall", "prompt": [33] * FLOOD_PROMPT_LEN, "max_tokens": 20, "ignore_eos": True}
        return (await http.post("/v1/completions", json=body)).status_code

    async def ask_all() -> set[int]:
        async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=None, limits=LIMITS) as http:
            return set(await asyncio.gather(*(ask(http) for _ in range(FLOOD_REQUESTS))))

    begin_s = time.monotonic()
    statuses = asyncio.run(ask_all())
    assert statuses == {200}, statuses
    return f"{time.monotonic() - begin_s:.3f}"


CONNECTIONS: dict[str, Callable[[str], str]] = {
    "an endless header": send_endless_header,
    "300 bodies that never arrive": hold_bodies,
    "idle connections": hold_idle_connections,
}
ATTACKS = [*BODIES, *CONNECTIONS]
FLOOD = "flood"


def _connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port), timeout=WAIT_S)


def _answer(sock: socket.socket) -> str:
    """Return the status and the body of the answer; empty if the connection just ends."""
    received = b""
    with suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            received += part
    head, _, body = received.decode().partition("\r\n\r\n")
    return f"{head[9:12]} {body}"


def main() -> None:
    url, name = sys.argv[1:]
    if name in BODIES:
        print(send_body(url, name))
    else:
        print(flood(url) if name == FLOOD else CONNECTIONS[name](url))


if __name__ == "__main__":
    main()
