"""Members of a cluster for real Ray, which register, answer Shutdown and Drain, and compute nothing."""

import os
from collections.abc import Mapping

import msgspec

from cluster.bootstrap.client import LeaseRenewer, ReplicaRegistrar
from cluster.channel import Inbox
from cluster.logs import ProcessLog
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation
from cluster.spec.messages import Drain, Message
from cluster.spec.registry import RankRecord, ReplicaLoad
from cluster.spec.step_messages import Shutdown
from cluster.spec.worker_spec import Rendezvous, RouterShare, WorkerSpec
from tests.fakes.rank_records import make_record

_BEAT_S = 0.3


class QuietWorker:
    """Worker that computes nothing. Its transfer session is its process id."""

    def __init__(self, _: ProcessLog, environ: Mapping[str, str]) -> None:
        os.environ.update(environ)

    def fetch(self, model: str) -> None:
        self._model = model

    def build(self, spec: WorkerSpec, rendezvous: Rendezvous) -> None:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        self._spec = spec
        self._rendezvous = rendezvous
        self._inbox = Inbox(spec.host)

    def open_store(self) -> str:
        return f"{self._spec.host}:{os.getpid()}"

    def load(self, store: str) -> RankRecord:
        if self._model == "broken" and self._spec.global_rank == 1:
            raise ValueError(f"rank {self._spec.global_rank} cannot load, store {store.partition(':')[0]}")
        spec = self._spec
        record = make_record(spec.replica, spec.global_rank, spec.sizes, spec.incarnation, address=self._inbox.address)
        endpoint = msgspec.structs.replace(record.endpoint, session=str(os.getpid()))
        return msgspec.structs.replace(record, endpoint=endpoint)

    def run(self, records: list[RankRecord]) -> None:
        renewer = None
        if self._spec.is_leader:
            meeting = self._rendezvous
            url, token = meeting.bootstrap_url, meeting.token
            renewer = ReplicaRegistrar(url, token, records, ReplicaLoad, lambda _: None, _BEAT_S, lambda _: None)
            renewer.start()
        else:
            meeting, record = self._rendezvous, records[self._spec.global_rank]
            LeaseRenewer(meeting.bootstrap_url, meeting.token, record, _BEAT_S, lambda _: None).start()
        _wait(self._inbox, Shutdown)
        if renewer is not None:
            renewer.stop()


class QuietRouter:
    """Router whose requests have always ended."""

    def __init__(self, _: ProcessLog, environ: Mapping[str, str], incarnation: Incarnation, share: RouterShare) -> None:
        del incarnation, share
        os.environ.update(environ)

    def start(self, config: DeployConfig, model: str, rendezvous: Rendezvous, host: str) -> tuple[str, str]:
        del model, rendezvous
        self._inbox = Inbox(host)
        url = f"http://{config.router.host}:{config.router.port}"
        return url, self._inbox.address

    def run(self) -> bool:
        _wait(self._inbox, Drain)
        return True


def _wait(inbox: Inbox, kind: type[Message]) -> None:
    while not any(isinstance(message, kind) for message in inbox.receive(60.0)):
        continue
    inbox.close()
