"""A prefill and a decode replica that compute nothing; every answer is there at once, or as fast as it is taken.

They tell the router of the pages of prompts that they served, as if they had cached them.
"""

import threading
import time

from cluster.channel import Inbox, Outbox
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Incarnation, Room, replica_id
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Cancel, FollowPages, Message, Output, PageNews, Submit
from cluster.spec.page_key import page_keys
from cluster.spec.registry import (
    Endpoint,
    KvOwnership,
    PageFilter,
    RankCoords,
    RankRow,
    ReplicaEntry,
    ReplicaLoad,
    TableSnapshot,
    TransferMode,
)
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import Shutdown

_HOST = "127.0.0.1"
_IDLE_S = 0.05
_BACK_OFF_S = 0.001
"""After the router's queue was full."""
_PAGE_SIZE = 64
_GEOMETRY = KvGeometry(model="mock", num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", page_size=_PAGE_SIZE)
_LAYOUT = PoolLayout(
    num_pages=1, first_head=0, num_heads=1, first_layer=0, num_layers=1, page_size=_PAGE_SIZE, head_dim=2, itemsize=4
)
_ONE = RankCoords(dp=1, cp=1, tp=1, pp=1)
_FIRST = RankCoords(dp=0, cp=0, tp=0, pp=0)


class MockReplicas:
    """Both leaders in one loop. They share an inbox, so each request comes twice; the second copy is dropped."""

    def __init__(self, token_id: int) -> None:
        """``token_id`` is every token of every answer."""
        self._token_ids = [token_id]
        self._inbox = Inbox(_HOST)
        self._outbox = Outbox()
        self._open: dict[Room, tuple[Submit, int]] = {}
        """Requests that have not got all their tokens, and how many they have."""
        self._came_once: set[Room] = set()
        self._first_keys: set[bytes] = set()
        """Of the prompts whose pages the router was told, or is to be told."""
        self._stored: list[bytes] = []
        """Keys that it is to be told."""
        self._follower = ""
        """The router's address, once it has asked."""
        self._num_news = 0

    def table(self) -> TableSnapshot:
        """What the bootstrap service would show of them."""
        return TableSnapshot(version=1, replicas=tuple(self._entry(role) for role in Role), reaped={})

    def start(self) -> None:
        """Answer in a thread until ``close``."""
        self._thread = threading.Thread(target=self._run, name="mock-replicas")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        outbox = Outbox()
        outbox.send(self._inbox.address, Shutdown(reason="the measurement is over"))
        outbox.close()
        self._thread.join()
        self._inbox.close()
        self._outbox.close()

    def cpu_s(self) -> float:
        """Seconds of processor time that this process has used."""
        return time.process_time()

    def _run(self) -> None:
        """One token for every open request in turn, as fast as the router takes them."""
        is_running = True
        while is_running:
            for message in self._inbox.receive(0.0 if self._open else _IDLE_S):
                is_running = is_running and self._take(message)
            for room in list(self._open):
                self._emit(room)
            self._tell()

    def _take(self, message: Message) -> bool:
        match message:
            case Submit():
                if message.room in self._came_once:
                    self._came_once.remove(message.room)
                else:
                    self._came_once.add(message.room)
                    self._open[message.room] = message, 0
            case Cancel():
                self._open.pop(message.room, None)
            case FollowPages():
                self._follower, self._num_news = message.router.address, 0
                self._first_keys.clear()
                self._stored.clear()
            case Shutdown():
                return False
        return True

    def _emit(self, room: Room) -> None:
        submit, num_sent = self._open[room]
        is_last = num_sent + 1 == submit.stopping.max_tokens
        output = Output(
            room=room,
            replica=submit.decode.replica,
            incarnation=submit.decode.incarnation,
            first_index=num_sent,
            token_ids=self._token_ids,
            finish=FinishReason.LENGTH if is_last else None,
        )
        try:
            self._outbox.send(submit.router.address, output)
        except PeerUnreachableError:
            time.sleep(_BACK_OFF_S)
            return
        if is_last:
            del self._open[room]
            self._store(submit)
        else:
            self._open[room] = submit, num_sent + 1

    def _store(self, submit: Submit) -> None:
        """Prompts of one measurement are the same or differ in their first page, so that one look tells which."""
        first_key = page_keys(submit.prompt_ids[:_PAGE_SIZE], _PAGE_SIZE)
        if first_key and first_key[0] not in self._first_keys:
            self._first_keys.add(first_key[0])
            self._stored += page_keys(submit.prompt_ids, _PAGE_SIZE)

    def _tell(self) -> None:
        """The first time even of nothing."""
        if not self._follower or (self._num_news and not self._stored):
            return
        news = PageNews(
            replica=replica_id(Role.PREFILL, 0),
            incarnation=Incarnation(1),
            number=self._num_news,
            stored=self._stored,
            removed=[],
        )
        try:
            self._outbox.send(self._follower, news)
        except PeerUnreachableError:
            return
        self._num_news += 1
        self._stored = []

    def _entry(self, role: Role) -> ReplicaEntry:
        row = RankRow(
            replica=replica_id(role, 0),
            role=role,
            incarnation=Incarnation(1),
            coords=_FIRST,
            sizes=_ONE,
            global_rank=0,
            address=self._inbox.address,
            endpoint=Endpoint(backend="mock", session="", base_address=0, num_bytes=0),
            geometry=_GEOMETRY,
            layout=_LAYOUT,
            transfer_mode=TransferMode.ALL_RANKS,
            page_filter=PageFilter.MODULAR,
            ownership=KvOwnership.REPLICATED,
            build="mock",
        )
        return ReplicaEntry(
            replica=row.replica, role=role, incarnation=row.incarnation, ready=True, rows=(row,), load=ReplicaLoad()
        )
