"""Replicas as plain processes, without Ray, HTTP or a router: for tests, and to try the engine alone.

python -m tests.fakes.local_cluster deploy/local-cpu.yaml "The launch code is tango seven
The launch code is"
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cluster.channel import Inbox, Outbox
from cluster.spec.config import DeployConfig
from cluster.spec.errors import PeerLostError
from cluster.spec.ids import ROUTER, Incarnation, Peer, ReplicaId, Role, Room, replica_id
from cluster.spec.loader import load_config
from cluster.spec.messages import (
    Command,
    CommandResult,
    Failure,
    Inquire,
    Message,
    Output,
    Outputs,
    Submit,
    TableUpdate,
    Wanted,
)
from cluster.spec.ranks import sizes_of, world_size
from cluster.spec.registry import RankRecord, ReplicaEntry, ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampling, Stopping, TokenLogprobs
from cluster.spec.step_messages import Shutdown
from cluster.spec.tiers import CachedTokens, FlushCache, Tier
from cluster.spec.wire import TokenIds
from cluster.spec.worker_spec import WorkerSpec
from router.dispatch import draw_room
from workers.bench.process import ANSWER_TIMEOUT_S, WORKER, RemoteError, WorkerProcess

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Request for ``LocalCluster.generate``."""

    token_ids: Sequence[int]
    stopping: Stopping
    sampling: Sampling = field(default_factory=Sampling)
    num_given: int = 0
    """Number of last tokens that are output of an earlier attempt."""
    shares_prompt: bool = False
    """Whether this is another choice of the preceding prompt."""
    on_decode: bool = False
    """Whether decode computes the prompt without prefill."""


@dataclass(slots=True)
class Answer:
    """Result of ``LocalCluster.answer``."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of all tokens, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of all prompt tokens but the first, if requested."""
    num_given: int = 0
    """Number of prompt tokens that are output of an earlier attempt."""
    cached: CachedTokens = field(default_factory=CachedTokens)


class LocalReplica:
    """Replica that runs in given processes."""

    def __init__(
        self, config: DeployConfig, role: Role, model_folder: Path, processes: Sequence[WorkerProcess]
    ) -> None:
        pool = config.prefill if role is Role.PREFILL else config.decode
        sizes = sizes_of(pool.parallel)
        self.replica: ReplicaId = replica_id(role, 0)
        self.role = role
        self.records: list[RankRecord] = []
        self.specs = [
            WorkerSpec(
                config=config,
                replica=self.replica,
                incarnation=Incarnation(1),
                global_rank=rank,
                host=HOST,
            )
            for rank in range(world_size(sizes))
        ]
        self.workers = list(processes[: len(self.specs)])
        for worker, spec in zip(self.workers, self.specs, strict=True):
            worker.call("make", spec, model_folder, None)
        self._results()

    def load(self) -> None:
        """Load every rank. Ranks meet at the first one's store."""
        self.workers[0].call("open_store")
        store = self.workers[0].result()
        for worker in self.workers:
            worker.call("load", store)
        self.records = self._results()

    def configure(self, config: DeployConfig) -> None:
        """Change settings that do not affect loading. Call this between runs."""
        self.specs = [dataclasses.replace(spec, config=config) for spec in self.specs]
        for worker, spec in zip(self.workers, self.specs, strict=True):
            worker.call("__setattr__", "spec", spec)
            worker.result()
        transfer = config.transfer
        self.records = [replace(record, transfer_mode=transfer.mode) for record in self.records]

    def start(self) -> None:
        for worker in self.workers:
            worker.call("run", self.records)

    def finish(self, outbox: Outbox) -> None:
        """Stop running. Raise the error that ended a rank."""
        for record in self.records:
            outbox.send(record.address, Shutdown())
        self._results()

    def _results(self) -> list[Any]:
        """Return the result of every rank. Raise the first cause if ranks have failed."""
        results: list[Any] = []
        errors: list[RemoteError] = []
        for worker in self.workers:
            try:
                results.append(worker.result())
            except RemoteError as error:
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: str(error).startswith(PeerLostError.__name__))
        return results

    @property
    def entry(self) -> ReplicaEntry:
        """Return this replica's entry in the bootstrap table."""
        return ReplicaEntry(
            replica=self.replica,
            incarnation=Incarnation(1),
            ready=True,
            ranks=tuple(self.records),
            load=ReplicaLoad(),
        )

    @property
    def peer(self) -> Peer:
        """Return this replica as a peer."""
        return self.records[0].peer


class LocalCluster:
    """Cluster of one prefill and one decode replica.

    Processes are kept when ``load`` is called again for another model or layout, or ``running`` is entered again with
    other settings.
    """

    def __init__(self, worker: str = WORKER) -> None:
        """Create the cluster. ``worker`` names the class of all ranks, as in ``WorkerProcess``."""
        self._worker = worker
        self._inbox = Inbox(HOST)
        self._outbox = Outbox()
        self._processes: list[WorkerProcess] = []
        self._replicas: list[LocalReplica] = []
        self._numbers = count(1)
        """Numbers of commands."""

    def load(self, config: DeployConfig, model_folder: Path, decode_config: DeployConfig | None = None) -> None:
        """Load both replicas again, with separate settings for decode if given."""
        num_prefill = world_size(sizes_of(config.prefill.parallel))
        num_decode = world_size(sizes_of(config.decode.parallel))
        while len(self._processes) < num_prefill + num_decode:
            self._processes.append(WorkerProcess(self._worker))
        self._replicas = [
            LocalReplica(config, Role.PREFILL, model_folder, self._processes),
            LocalReplica(decode_config or config, Role.DECODE, model_folder, self._processes[num_prefill:]),
        ]
        for replica in self._replicas:
            replica.load()

    @contextmanager
    def running(
        self, config: DeployConfig | None = None, decode_config: DeployConfig | None = None
    ) -> Iterator["LocalCluster"]:
        """Run both replicas, with separate settings for decode if given. On exit, raise the error that ended a rank."""
        for replica in self._replicas:
            chosen = decode_config if decode_config is not None and replica.role is Role.DECODE else config
            if chosen is not None:
                replica.configure(chosen)
            replica.start()
        for replica in self._replicas:
            self._outbox.send(replica.peer.address, TableUpdate(snapshot=self.snapshot))
        try:
            yield self
        finally:
            for replica in self._replicas:
                replica.finish(self._outbox)

    @property
    def snapshot(self) -> TableSnapshot:
        """Return the table with both replicas, for a router or the replicas themselves."""
        return TableSnapshot(version=1, replicas=tuple(replica.entry for replica in self._replicas), reaped={})

    def records(self, role: Role) -> list[RankRecord]:
        """Return the rank records of a replica, by global rank."""
        return next(replica.records for replica in self._replicas if replica.role is role)

    def ask(self, role: Role, method: str) -> list[Any]:
        """Return the results of a worker method, by global rank. Call this between runs."""
        (workers,) = (replica.workers for replica in self._replicas if replica.role is role)
        for worker in workers:
            worker.call(method)
        return [worker.result() for worker in workers]

    def generate(self, prompts: Sequence[Prompt], timeout_s: float = ANSWER_TIMEOUT_S) -> list[list[int]]:
        """Return the output tokens of every prompt. All prompts are submitted together."""
        return [answer.token_ids for answer in self.answer(prompts, timeout_s)]

    def answer(self, prompts: Sequence[Prompt], timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        """Return the answers with log-probabilities and other details."""
        rooms: list[Room] = []
        first: Room | None = None
        for prompt in prompts:
            rooms.append(self._submit(prompt, first if prompt.shares_prompt else None))
            first = first if prompt.shares_prompt else rooms[-1]
        answers = {room: Answer(num_given=prompt.num_given) for room, prompt in zip(rooms, prompts, strict=True)}
        unfinished = set(rooms)
        while unfinished:
            messages = self._inbox.receive(timeout_s)
            if not messages:
                raise RemoteError(f"{len(unfinished)} of {len(rooms)} prompts got no token within {timeout_s} s")
            for message in _apart(messages):
                if message.room not in answers:
                    continue  # output of prompts that failed in an earlier call
                if isinstance(message, Failure):
                    raise RemoteError(f"{message.replica}: {message.reason}")
                answer = answers[message.room]
                assert message.first_index == answer.num_given + len(answer.token_ids), "tokens out of order"
                answer.token_ids += message.token_ids
                answer.logprobs += message.logprobs
                answer.prompt_logprobs += message.prompt_logprobs
                answer.cached += message.cached
                if message.finish is not None:
                    unfinished.remove(message.room)
        return [answers[room] for room in rooms]

    def flush(self, *tiers: Tier) -> None:
        """Clear these tiers on both replicas before later requests."""
        for replica in self._replicas:
            self._outbox.send(replica.peer.address, FlushCache(tiers=tiers))

    def run_command(self, role: Role, wanted: Wanted, timeout_s: float = ANSWER_TIMEOUT_S) -> CommandResult:
        """Run an administrative command on an idle replica. Return its result."""
        (peer,) = (replica.peer for replica in self._replicas if replica.role is role)
        number = next(self._numbers)
        command = Command(number=number, sender=self._me, incarnation=peer.incarnation, wanted=wanted)
        self._outbox.send(peer.address, command)
        while messages := self._inbox.receive(timeout_s):
            for message in messages:
                if isinstance(message, CommandResult) and message.number == number:
                    return message
        raise RemoteError(f"{peer.replica} did not answer {type(wanted).__name__} within {timeout_s} s")

    def close(self) -> None:
        for process in self._processes:
            process.stop()
        for process in self._processes:
            process.close()
        self._inbox.close()
        self._outbox.close()

    @property
    def _me(self) -> Peer:
        """Return the router whose part this process plays."""
        return Peer(replica=ROUTER, incarnation=Incarnation(1), address=self._inbox.address)

    def _submit(self, prompt: Prompt, prompt_of: Room | None) -> Room:
        prefill, decode = (replica.peer for replica in self._replicas)
        alone = prompt.on_decode or prompt_of is not None
        submit = Submit(
            room=draw_room(),
            prompt_ids=TokenIds.of(prompt.token_ids),
            sampling=prompt.sampling,
            stopping=prompt.stopping,
            prefill=None if alone else prefill,
            decode=decode,
            router=self._me,
            num_given=prompt.num_given,
            prompt_of=prompt_of,
        )
        for peer in (decode,) if alone else (prefill, decode):
            self._outbox.send(peer.address, submit)
        return submit.room


@contextmanager
def small_pool_cluster(folder: Path) -> Iterator[LocalCluster]:
    """Run two CP ranks and a decode rank with 30 pages of 16 tokens each. Its prompts take several chunks."""
    kv, prefill = {"page_size": 16, "memory_gib": 31.5 * 8192 / 2**30}, {"strategy": "zigzag", "chunk_tokens": 37}
    tree = {"model": {"served_name": "qwen3"}, "kv": kv, "prefill": prefill | {"parallel": {"cp": 2}}}
    with closing(LocalCluster()) as cluster:
        cluster.load(DeployConfig.model_validate(tree), folder)
        with cluster.running():
            yield cluster


def _apart(messages: Iterable[Message]) -> Iterator[Output | Failure]:
    """Yield outputs and failures. Inquiries need no reply, because no client disconnects here."""
    for message in messages:
        assert isinstance(message, Outputs | Failure | Inquire), message
        if isinstance(message, Outputs):
            yield from message.outputs
        elif isinstance(message, Failure):
            yield message


def main(deploy_file: str, text: str) -> None:
    """Answer one prompt and print the answer."""
    from cluster.tokenizer import Tokenizer
    from workers.models.resolve import resolve_model

    config = load_config(Path(deploy_file), {})
    folder = resolve_model(config.model.path)
    tokenizer = Tokenizer(folder)
    cluster = LocalCluster()
    try:
        cluster.load(config, folder)
        stopping = Stopping(max_tokens=64, stop_token_ids=frozenset(tokenizer.eos_ids))
        with cluster.running():
            (answer,) = cluster.generate([Prompt(tokenizer.encode(text), stopping)])
        print(tokenizer.decode(answer))
    finally:
        cluster.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
