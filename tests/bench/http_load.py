"""HTTP clients of one server, in one event loop, that take less CPU time than the server."""

import asyncio
import itertools
import json
import random
import time
from urllib.parse import urlsplit

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request_of(url: str, prompt_len: int, num_tokens: int) -> bytes:
    prompt = random.Random(prompt_len).choices(range(300, 1000), k=prompt_len)
    body = {"model": "mock", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": num_tokens > 1}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def connect(url: str) -> Connection:
    at = urlsplit(url)
    return await asyncio.open_connection(at.hostname, at.port, limit=1 << 20)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a prepared request and read its complete answer. httpx would take more CPU time than the router."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"content-length: " in head:
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    else:
        while not (await reader.readuntil(b"\r\n")).startswith(b"0\r\n"):
            pass
        await reader.readexactly(2)


async def full_load(url: str, request: bytes, num_connections: int, seconds: float) -> tuple[int, float]:
    """Keep every connection busy. Return the number of answers and the time."""
    start_s = time.monotonic()

    async def client() -> int:
        reader, writer = await connect(url)
        for count in itertools.count():
            if time.monotonic() >= start_s + seconds:
                writer.close()
                return count
            await ask(reader, writer, request)
        raise AssertionError("counting never ends")

    counts = await asyncio.gather(*(client() for _ in range(num_connections)))
    return sum(counts), time.monotonic() - start_s


async def random_load(url: str, request: bytes, per_s: float, num_connections: int, seconds: float) -> list[float]:
    """Send requests at random times, whatever the answers. Return the latency of each, in seconds, sorted.

    Args:
        num_connections: number of connections to begin with; a request that finds none idle opens another one.
    """
    idle = [await connect(url) for _ in range(num_connections)]
    latencies_s, tasks = list[float](), set[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()

    async def client() -> None:
        connection = idle.pop() if idle else await connect(url)
        begin_s = time.perf_counter()
        await ask(*connection, request)
        latencies_s.append(time.perf_counter() - begin_s)
        idle.append(connection)

    def begin() -> None:
        task = loop.create_task(client())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def arrive() -> None:
        """Begin requests from a thread, because libuv's timers have a resolution of a millisecond."""
        due_s = start_s = time.perf_counter()
        while (due_s := due_s + random.expovariate(per_s)) < start_s + seconds:
            time.sleep(max(due_s - time.perf_counter(), 0.0))
            loop.call_soon_threadsafe(begin)

    await asyncio.to_thread(arrive)
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return sorted(latencies_s)
