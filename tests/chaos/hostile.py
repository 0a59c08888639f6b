"""Requests and connections of a hostile client: ``python -m tests.chaos.hostile URL NAME`` prints the answer.

They run in a process of their own, because making large bodies would delay the clients of the test.
"""

import asyncio
import json
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from cluster.bench.endpoint import key_headers

WAIT_S = 90.0
HEADER_BYTES = 131 << 20
NUM_BODIES = 300
NUM_LEAVING, NUM_SLOW = 7000, 14
NUM_HEADS, HEAD_BYTES = 7000, 63_000
NUM_KEYS, NUM_SMALL = 5000, 130
SPARE_DESCRIPTORS, ACCEPT_S, HOLD_S = 100, 1.0, 5.0
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
    "an ambiguous grammar": lambda: {
        "prompt": [20, 21],
        "guided_grammar": 'start: a\na: "x" | a a | " " | /[a-z]/ a',
        "n": 64,
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 1.5,
    },
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
    "biases of 1,024 prompts": lambda: {"prompt": [[5]] * 1024, "logit_bias": {str(i): 1 for i in range(1024)}},
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
    with _opened(url, NUM_BODIES) as socks:
        for sock in socks:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        return min(_answer(sock) for sock in socks)


def hold_idle_connections(url: str) -> str:
    """Open as many connections as a process may, send nothing, and return the answer to a request on one more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _opened(url, limit - SPARE_DESCRIPTORS):
        time.sleep(HOLD_S)
        return _health(url)


def burst_headers(url: str) -> str:
    """Send a head with very many headers on each of many connections, all at once, and return the last answer."""
    return _burst(url, 1000, b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 10_000 + b"\r\n")


def burst_requests(url: str) -> str:
    """Send pipelined requests on each of many connections, all at once, and return the last answer."""
    return _burst(url, 2500, (b"GET /x HTTP/1.1\r\n" + b"a:b\r\n" * 60 + b"\r\n") * 60)


def _burst(url: str, num_connections: int, sent: bytes) -> str:
    with _opened(url, num_connections) as socks:
        for sock in socks:
            sock.sendall(sent)
        return _answer(socks[-1])


def hold_heads(url: str) -> str:
    """Send the beginning of a large head on each of many connections, all at once; return the answer to a request."""
    return _hold(url, b"GET /health HTTP/1.1\r\na: " + b"x" * HEAD_BYTES)


def hold_complete_heads(url: str) -> str:
    """Send a large head without its body on each of many connections, all at once; return the answer to a request."""
    headers = (b"a: " + b"x" * 500 + b"\r\n") * (HEAD_BYTES // 505)
    return _hold(url, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n" + headers + b"\r\n")


def _hold(url: str, sent: bytes) -> str:
    with _opened(url, NUM_HEADS) as socks:
        time.sleep(ACCEPT_S)
        for sock in socks:
            with suppress(ConnectionError):  # connections that hold something for long are given up
                sock.sendall(sent)
        time.sleep(HOLD_S)
        return _health(url)


def leave_together(url: str) -> str:
    """Send many bodies behind some that take long to read, leave all at once, and return the answer to a request."""
    slow = _request({"guided_json": _MANY})
    quick = _request({"guided_regex": "a"})
    with _opened(url, NUM_LEAVING) as socks:
        for number, sock in enumerate(socks):
            sock.sendall(slow if number < NUM_SLOW else quick)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(HOLD_S)
    return _health(url)


def crowd_out_grammars(url: str) -> str:
    """Send more grammars than a replica keeps, behind some that take long to compile, and return the worst answer."""
    started = time.time_ns()  # no grammar is known from an earlier attack
    costly = [{f"{started}-{number}-{key}": {"type": "integer"} for key in range(NUM_KEYS)} for number in range(2)]
    schemas: list[dict[str, Any]] = [
        {"guided_json": {"type": "object", "properties": keys, "required": list(keys)}} for keys in costly
    ]
    small: list[dict[str, Any]] = [{"guided_choice": [f"{started}-{number}", "b"]} for number in range(NUM_SMALL)]

    async def ask(http: httpx.AsyncClient, fields: dict[str, Any]) -> str:
        body = {"model": "recall", "prompt": [20, 21], "max_tokens": 3, **fields}
        reply = await http.post("/v1/completions", json=body)
        return f"{reply.status_code} {reply.text}"

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=LIMITS, trust_env=False) as http:
            return await asyncio.gather(*(ask(http, fields) for fields in [*schemas, *small]))

    return max(asyncio.run(ask_all()))


def _request(fields: dict[str, Any]) -> bytes:
    body = json.dumps({"model": "recall", "prompt": "a", "max_tokens": 1, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


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
    "1,000 heads of 10,000 headers at once": burst_headers,
    "150,000 pipelined requests at once": burst_requests,
    "7,000 large heads without an end": hold_heads,
    "7,000 large heads without bodies": hold_complete_heads,
    "7,000 clients that leave together": leave_together,
    "130 grammars behind costly ones": crowd_out_grammars,
}
ATTACKS = [*BODIES, *CONNECTIONS]
FLOOD = "flood"


def _connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port), timeout=WAIT_S)


@contextmanager
def _opened(url: str, number: int) -> Generator[list[socket.socket], None, None]:
    """Open connections; close all of them at the end."""
    with ExitStack() as opened:
        yield [opened.enter_context(_connect(url)) for _ in range(number)]


def _health(url: str) -> str:
    with _connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return _answer(sock)


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
