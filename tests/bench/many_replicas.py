"""Control plane of a large cluster whose replicas are made up.

    python -m tests.bench.many_replicas [--prefill 16] [--decode 64] [--cp 8] [--seconds 10]

Prints one JSON object: the load of a bootstrap service to which every rank reports each second, the number of tables
that it sends to each leader and router, with the time to decode one, and the time in which a router chooses the
replicas of a prompt of 100,000 tokens, of which every fourth prefill replica has all pages in one tier.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from statistics import median

import httpx
import msgspec

from cluster.bootstrap.client import WATCH_S
from cluster.bootstrap.service import BootstrapServer
from cluster.bootstrap.table import records_digest
from cluster.spec.clock import HEARTBEAT_S
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Peer, Role, Room, replica_id
from cluster.spec.messages import KvEvents
from cluster.spec.registry import Heartbeat, RankRecord, ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.tiers import Tier
from cluster.spec.wire import TokenIds
from router.directory import Breakers, Directory, LoadBook
from router.page_index import PromptKeys
from router.picker import Picker
from router.request import GenerateRequest
from tests.bench.router import call
from tests.fakes.bootstrap import entry_of, peer_of, table_of
from tests.fakes.rank_records import make_records, sizes
from workers.bench.process import WorkerProcess

PROMPT_LEN, NUM_PICKS = 100_000, 50
_SETTLE_S = 3.0
_TOKEN = "token"


class Service:
    """Bootstrap service in a process of its own."""

    def __init__(self) -> None:
        self._server = BootstrapServer("127.0.0.1", 0, _TOKEN)

    def start(self) -> str:
        return self._server.start()

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._server.stop()


class Ranks:
    """Ranks of all replicas, which report to the service, with one leader and one router that watch its table."""

    def __init__(self, http: httpx.AsyncClient, replicas: Sequence[Sequence[RankRecord]]) -> None:
        self._http = http
        self._replicas = replicas
        self.heartbeats_s: list[float] = []
        """Time of each heartbeat."""
        self.num_tables = {"leader": 0, "router": 0}
        self.decodes_s: list[float] = []
        """Time to decode each table."""

    async def register(self) -> None:
        for record in (record for records in self._replicas for record in records):
            (await self._http.put("/ranks", content=msgspec.json.encode(record))).raise_for_status()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch("leader", WATCH_S))
            tasks.create_task(self._watch("router", HEARTBEAT_S))
            for records in self._replicas:
                tasks.create_task(self._beat(records))
                for record in records[1:]:
                    tasks.create_task(self._renew(record))

    async def _beat(self, records: Sequence[RankRecord]) -> None:
        digest, leader = records_digest(records), records[0]
        await asyncio.sleep(random.random() * HEARTBEAT_S)
        for count in itertools.count():
            load = ReplicaLoad(num_tokens=count, total_pages=1000)
            beat = Heartbeat(replica=leader.replica, incarnation=leader.incarnation, records_digest=digest, load=load)
            began_s = time.perf_counter()
            (await self._http.post("/heartbeats", content=msgspec.json.encode(beat))).raise_for_status()
            self.heartbeats_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(HEARTBEAT_S)

    async def _renew(self, record: RankRecord) -> None:
        path = f"/replicas/{record.replica}/alive?incarnation={record.incarnation}&rank={record.global_rank}"
        await asyncio.sleep(random.random() * HEARTBEAT_S)
        while True:
            (await self._http.post(path)).raise_for_status()
            await asyncio.sleep(HEARTBEAT_S)

    async def _watch(self, name: str, watch_s: float) -> None:
        version = -1
        while True:
            reply = await self._http.get(f"/watch?version={version}&timeout_s={watch_s}")
            if reply.status_code == 200:
                began_s = time.perf_counter()
                version = msgspec.json.decode(reply.content, type=TableSnapshot).version
                self.decodes_s.append(time.perf_counter() - began_s)
                self.num_tables[name] += 1


async def measure_service(replicas: Sequence[Sequence[RankRecord]], seconds: float) -> dict[str, float]:
    with closing(WorkerProcess("tests.bench.many_replicas:Service")) as service:
        call(service, "make")
        client = httpx.AsyncClient(
            base_url=call(service, "start"), headers={"Authorization": f"Bearer {_TOKEN}"}, timeout=60, trust_env=False
        )
        async with client as http:
            ranks = Ranks(http, replicas)
            await ranks.register()
            running = asyncio.create_task(ranks.run())
            await asyncio.sleep(_SETTLE_S)
            ranks.heartbeats_s.clear()
            ranks.num_tables = dict.fromkeys(ranks.num_tables, 0)
            before_s, began_s = call(service, "cpu_s"), time.perf_counter()
            await asyncio.sleep(seconds)
            passed_s = time.perf_counter() - began_s
            cpu_s = call(service, "cpu_s") - before_s
            running.cancel()
            await asyncio.wait([running])
    tables = {f"tables_per_s_{name}": round(count / passed_s, 2) for name, count in ranks.num_tables.items()}
    return tables | {
        "table_decode_ms": round(1e3 * median(ranks.decodes_s), 2),
        "service_cores": round(cpu_s / passed_s, 3),
        "heartbeats_per_s": round(len(ranks.heartbeats_s) / passed_s, 1),
        "heartbeat_p50_ms": round(1e3 * median(ranks.heartbeats_s), 1),
    }


def measure_picks(prefills: Sequence[Peer], decodes: Sequence[Peer], tier: Tier) -> float:
    """Return the median time in ms to choose replicas for a prompt that every fourth replica has in this tier."""
    prompt = TokenIds.of([index % 30_000 for index in range(PROMPT_LEN)])
    config, directory, load = DeployConfig(), Directory(grace_s=3.0), LoadBook()
    directory.update(table_of(*map(entry_of, [*prefills, *decodes])), 0.0)
    picker = Picker(config, directory, load, Breakers(), random.Random(0))
    picker.pages.update(prefills, 0.0)
    keys = PromptKeys(prompt, config.kv.page_size, "").all()
    for index, peer in enumerate(prefills):
        for events in reports(peer, keys if index % 4 == 0 else [], tier):
            picker.pages.on_kv_events(events, 0.0)
    for peer in [*prefills, *decodes]:
        load.add(peer, 1000)
    return median(timed_pick(picker, prompt, keys) for _ in range(NUM_PICKS))


def reports(peer: Peer, keys: list[bytes], tier: Tier) -> Iterator[KvEvents]:
    others = [os.urandom(16) for _ in range(10_000)]
    for number, (stored, where) in enumerate([(others, Tier.DEVICE), (keys, tier)]):
        yield KvEvents(
            replica=peer.replica, incarnation=peer.incarnation, number=number, stored=stored, removed=[], tier=where
        )


def timed_pick(picker: Picker, prompt: TokenIds, keys: list[bytes]) -> float:
    request = GenerateRequest(
        prompt_ids=prompt,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=4),
        page_keys=PromptKeys(prompt, DeployConfig().kv.page_size, "", keys),
    )
    began_s = time.perf_counter()
    assert picker.why_full([request], 0.0) is None
    assert picker.pick(request, Room(1), frozenset(), 0.0) is not None
    return 1e3 * (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=16, help="number of prefill replicas")
    parser.add_argument("--decode", type=int, default=64, help="number of decode replicas, of one rank each")
    parser.add_argument("--cp", type=int, default=8, help="number of ranks of a prefill replica")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the load on the service")
    args = parser.parse_args()
    names = {
        role: [replica_id(role, index) for index in range(count)]
        for role, count in ((Role.PREFILL, args.prefill), (Role.DECODE, args.decode))
    }
    replicas = [make_records(name, sizes(cp=args.cp)) for name in names[Role.PREFILL]]
    replicas += [make_records(name, sizes()) for name in names[Role.DECODE]]
    prefills, decodes = ([peer_of(name) for name in names[role]] for role in (Role.PREFILL, Role.DECODE))
    picks = {f"pick_{tier}_ms": round(measure_picks(prefills, decodes, tier), 2) for tier in Tier}
    print(json.dumps(asyncio.run(measure_service(replicas, args.seconds)) | picks))


if __name__ == "__main__":
    main()
