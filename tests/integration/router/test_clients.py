"""Clients that wait, disconnect, or read slowly."""

import asyncio
import json
import socket
import time

import httpx
import pytest

from cluster.http.connection import MAX_PIPELINED
from tests.fakes.router_cluster import MODEL, RouterCluster

pytestmark = pytest.mark.integration

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


def connect(cluster: RouterCluster) -> socket.socket:
    host, port = cluster.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def posted(content: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


class TestClients:
    def test_a_client_that_strips_chunks_reads_a_stream_that_waits(self, cluster: RouterCluster) -> None:
        """`vllm bench serve` strips the white space of every chunk and splits the rest at blank lines."""
        cluster.decode.flow.clear()
        with cluster.http.stream("POST", "/v1/completions", json=STREAM) as reply:
            chunks = reply.iter_raw()
            assert [next(chunks) for _ in range(2)] == [b"\n", b"\n"]
            cluster.decode.flow.set()
            stripped = filter(None, (chunk.strip() for chunk in chunks))
            events = [event for chunk in stripped for event in chunk.split(b"\n\n")]
        assert all(event.startswith(b"data: ") for event in events)
        assert events[-1] == b"data: [DONE]"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_response_to_http_1_0_ends_with_the_connection(self, cluster: RouterCluster, stream: bool) -> None:
        content = json.dumps(STREAM | {"stream": stream}).encode()
        with connect(cluster) as client:
            client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        if stream:
            assert body.endswith(b"data: [DONE]\n\n")
            assert all(event.startswith(b"data: ") for event in body.strip().split(b"\n\n"))
        else:
            assert json.loads(body)["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("after_first_token", [False, True])
    def test_leaving_cancels_both_replicas_at_once(
        self, cluster: RouterCluster, stream: bool, after_first_token: bool
    ) -> None:
        cluster.decode.token_s = 0.05
        if not after_first_token:
            cluster.decode.flow.clear()
        content = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": stream}).encode()
        with connect(cluster) as client:
            client.sendall(posted(content))
            room = cluster.decode.wait_submits(1)[0].room
            if after_first_token and stream:
                assert client.recv(100)
        assert cluster.prefill.wait_cancels(1)[0].room == room
        assert cluster.decode.wait_cancels(1)[0].room == room
        cluster.assert_empty()
        assert cluster.metric('baton_request_ended_total{outcome="cancelled"}') == 1

    @pytest.mark.parametrize("num_more", [1, MAX_PIPELINED])
    def test_leaving_is_noticed_while_further_requests_wait(self, cluster: RouterCluster, num_more: int) -> None:
        cluster.decode.flow.clear()
        content = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 500}).encode()
        with connect(cluster) as client:
            client.sendall(posted(content))
            cluster.decode.wait_submits(1)
            client.sendall(posted(b" " * (100_000 // num_more)) * num_more)
            time.sleep(0.1)  # until reading is paused
        cluster.decode.wait_cancels(1)
        cluster.assert_empty()

    async def test_many_streams_with_disconnecting_clients(self, cluster: RouterCluster) -> None:
        cluster.decode.token_s = 0.005

        async def run(http: httpx.AsyncClient, index: int) -> None:
            prompt = f"client {index:02d};" * (1 + index % 4)
            leaves = index % 10 == 3
            num_tokens = 450 if leaves else 40 + 5 * index
            body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
            text = ""
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    if leaves and len(text) > 20:
                        return
            assert text == (prompt * 40)[:num_tokens]

        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(run(http, index) for index in range(32)))
        cluster.assert_empty()
        assert cluster.metric('baton_request_ended_total{outcome="finished"}') == 29
        assert cluster.metric('baton_request_ended_total{outcome="cancelled"}') == 3

    def test_a_slow_reader_delays_no_other_client(self, cluster: RouterCluster) -> None:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 500, "stream": True}
        with cluster.http.stream("POST", "/v1/completions", json=body) as slow:
            assert cluster.complete("hello", max_tokens=7)["choices"][0]["text"] == "hellohe"
            lines = [line for line in slow.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == ("abc" * 200)[:500]
