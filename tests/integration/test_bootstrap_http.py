"""The bootstrap service over real sockets: routes, refusals, watches, leases, and its own restart."""

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from cluster.bootstrap.client import BootstrapClient, LeaseRenewer, ReplicaRegistrar
from cluster.bootstrap.service import MAX_BODY_BYTES, BootstrapProtocol, BootstrapServer, create_app
from cluster.bootstrap.table import BootstrapTable, RefusalCode, TableRefusedError, records_digest
from cluster.spec.clock import SystemClock
from cluster.spec.errors import BatonError, PeerUnreachableError, UserError
from cluster.spec.ids import Incarnation, ReplicaId, router_names
from cluster.spec.registry import Heartbeat, ReplicaLoad, TableSnapshot
from tests.fakes.rank_records import make_record, make_records, sizes
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration

TOKEN = "token-of-the-test"
LEASE_S = 1.0
P0 = ReplicaId("prefill-0")
CP2 = sizes(cp=2)
RECORDS = make_records(P0, CP2)
STRANGER = msgspec.structs.replace(RECORDS[0], replica=ReplicaId("leader-0"))
BEAT = Heartbeat(
    replica=P0, incarnation=RECORDS[0].incarnation, records_digest=records_digest(RECORDS), load=ReplicaLoad()
)
WAIT_S = 60.0
ROUTES = [
    (method.upper(), path)
    for path, methods in create_app(BootstrapTable(LEASE_S), TOKEN, SystemClock()).openapi()["paths"].items()
    for method in methods
    if path != "/health"
]
"""Routes of the service that require the token."""


@pytest.fixture
def url() -> Iterator[str]:
    server = BootstrapServer("127.0.0.1", 0, TOKEN, LEASE_S)
    yield server.start()
    server.stop()


@pytest.fixture(scope="module")
def empty_url() -> Iterator[str]:
    """Yield a service in which no test registers anything."""
    server = BootstrapServer("127.0.0.1", 0, TOKEN, LEASE_S)
    yield server.start()
    server.stop()


@pytest.fixture
def client(url: str) -> Iterator[BootstrapClient]:
    client = BootstrapClient(url, TOKEN)
    yield client
    client.close()


def make_ready(client: BootstrapClient) -> None:
    for record in RECORDS:
        client.register(record)
    assert client.heartbeat(BEAT)


def is_ready(snapshot: TableSnapshot) -> bool:
    entry = snapshot.find(P0)
    return entry is not None and entry.ready


def test_records_travel_and_come_back(client: BootstrapClient) -> None:
    assert not client.heartbeat(BEAT)
    make_ready(client)
    entry = client.table().find(P0)
    assert entry is not None
    assert (entry.ranks, entry.ready) == (tuple(RECORDS), True)
    client.unregister(P0, RECORDS[0].incarnation, reaped=True)
    assert client.table().replicas == ()
    assert client.table().reaped == {P0: RECORDS[0].incarnation}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_requires_the_token(empty_url: str, method: str, path: str, headers: dict[str, str]) -> None:
    reply = httpx.request(method, f"{empty_url}{path}", headers=headers, trust_env=False)
    assert reply.status_code == 401
    assert reply.json()["error"]["message"] == "wrong or missing bearer token in the Authorization header"


def test_a_body_without_end_is_refused(url: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = httpx.post(f"{url}/heartbeats", headers=headers, content=b" " * (MAX_BODY_BYTES + 1), trust_env=False)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        413,
        f"the body is larger than {MAX_BODY_BYTES} bytes",
    )


def test_health_needs_no_token(empty_url: str) -> None:
    assert httpx.get(f"{empty_url}/health", trust_env=False).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("PUT", "/ranks", b"{", 400, "the body is not a RankRecord: Input data was truncated"),
        ("PUT", "/ranks", b"{}", 400, "missing required field `replica`"),
        ("PUT", "/ranks", msgspec.json.encode(STRANGER), 409, "'leader-0' is not of the form"),
        ("POST", "/replicas/prefill-0/alive?incarnation=1&rank=x", b"", 400, "rank: Input should be a valid integer"),
        ("DELETE", "/replicas/leader-0?incarnation=1", b"", 400, "'leader-0' is not of the form"),
        ("DELETE", "/replicas/prefill-0", b"", 400, "incarnation: Field required"),
        ("DELETE", f"/replicas/prefill-0?incarnation={10**30}", b"", 400, "incarnation: Input should be less than"),
        ("GET", "/watch?version=0&timeout_s=1e9", b"", 400, "timeout_s: Input should be less than or equal to 60"),
        ("GET", "/nowhere", b"", 404, "Not Found"),
    ],
)
def test_errors_explain_the_mistake(
    empty_url: str, method: str, path: str, body: bytes, status: int, words: str
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = httpx.request(method, f"{empty_url}{path}", content=body, headers=headers, trust_env=False)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]


def test_refusals_of_the_table_reach_the_caller(client: BootstrapClient) -> None:
    client.register(make_record(P0, 0, CP2, incarnation=5))
    with pytest.raises(TableRefusedError, match="incarnation 1 was replaced by 5") as caught:
        client.register(RECORDS[0])
    assert caught.value.code is RefusalCode.SUPERSEDED
    with pytest.raises(TableRefusedError, match="replaced by 5"):
        client.heartbeat(BEAT)
    with pytest.raises(TableRefusedError, match="got build other"):
        client.register(make_record(P0, 1, CP2, incarnation=5, build="other"))


def test_wrong_token_and_absent_service_have_their_own_errors(url: str) -> None:
    stranger = BootstrapClient(url, "another-token")
    with pytest.raises(BatonError, match="bearer token"):
        stranger.table()
    stranger.close()
    lost = BootstrapClient("http://127.0.0.1:9", TOKEN)
    with pytest.raises(PeerUnreachableError, match=r"the bootstrap service at http://127.0.0.1:9 does not respond"):
        lost.table()
    lost.close()


def test_watch_returns_on_change_on_expiry_and_on_time(url: str, client: BootstrapClient) -> None:
    version = client.table().version
    before_s = time.monotonic()
    assert client.watch(version, 0.1) is None
    assert time.monotonic() - before_s >= 0.1
    other = BootstrapClient(url, TOKEN)
    threading.Timer(0.05, make_ready, [other]).start()
    while not is_ready(snapshot := client.watch(version, WAIT_S) or pytest.fail("no change seen")):
        version = snapshot.version
    before_s = time.monotonic()
    expired = client.watch(snapshot.version, WAIT_S)
    assert expired is not None
    assert not is_ready(expired)
    assert time.monotonic() - before_s < WAIT_S
    other.close()


def test_a_changed_load_waits_for_the_end_of_the_watch(url: str, client: BootstrapClient) -> None:
    make_ready(client)
    version = client.table().version
    other = BootstrapClient(url, TOKEN)
    busy = msgspec.structs.replace(BEAT, load=ReplicaLoad(num_tokens=7))
    threading.Timer(0.05, other.heartbeat, [busy]).start()
    before_s = time.monotonic()
    snapshot = client.watch(version, 0.5)
    assert time.monotonic() - before_s >= 0.5
    assert snapshot is not None
    assert [one.load.num_tokens for one in snapshot.replicas] == [7]
    other.close()


def test_ending_service_answers_its_watchers() -> None:
    server = BootstrapServer("127.0.0.1", 0, TOKEN, LEASE_S)
    client = BootstrapClient(server.start(), TOKEN)
    version = client.table().version
    threading.Timer(0.1, server.stop).start()
    before_s = time.monotonic()
    assert client.watch(version, 30.0) is None
    server.run()
    assert time.monotonic() - before_s < WAIT_S
    client.close()


def test_port_in_use_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            BootstrapServer("127.0.0.1", port, TOKEN, LEASE_S).start()


def test_the_end_of_every_router_process_is_reported(client: BootstrapClient) -> None:
    for name in router_names(2):
        client.unregister(name, Incarnation(2), reaped=True)
    assert client.table().reaped == {"router": 2, "router-1": 2}


def registrar_of(url: str, tables: list[TableSnapshot], failures: list[Exception]) -> ReplicaRegistrar:
    return ReplicaRegistrar(url, TOKEN, RECORDS, ReplicaLoad, tables.append, 0.05, failures.append)


def follower_of(url: str, failures: list[Exception]) -> LeaseRenewer:
    return LeaseRenewer(url, TOKEN, RECORDS[1], 0.05, failures.append)


def test_lease_keeper_registers_renews_and_leaves(url: str, client: BootstrapClient) -> None:
    tables: list[TableSnapshot] = []
    registrar, follower = registrar_of(url, tables, []), follower_of(url, [])
    registrar.start()
    follower.start()
    wait_until(lambda: tables and is_ready(tables[-1]))
    time.sleep(1.5 * LEASE_S)
    assert is_ready(client.table())
    follower.stop()
    wait_until(lambda: not is_ready(tables[-1]))
    assert tables[-1].replicas[0].silent == (1,)
    before_s = time.monotonic()
    registrar.stop()
    assert time.monotonic() - before_s < 10.0, "the long poll is not waited for"
    assert client.table().replicas == ()


def test_no_lease_expires_while_the_service_is_stalled(
    url: str, client: BootstrapClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[TableSnapshot] = []
    registrar, follower = registrar_of(url, tables, []), follower_of(url, [])
    registrar.start()
    follower.start()
    wait_until(lambda: tables and is_ready(tables[-1]))
    version, snapshot = client.table().version, BootstrapTable.snapshot

    def stall(table: BootstrapTable, now_s: float) -> TableSnapshot:
        monkeypatch.setattr(BootstrapTable, "snapshot", snapshot)
        time.sleep(3 * LEASE_S)
        return snapshot(table, now_s)

    monkeypatch.setattr(BootstrapTable, "snapshot", stall)
    client.table()
    time.sleep(1.5 * LEASE_S)
    assert client.table().version == version, "no rank was taken for silent"
    follower.stop()
    registrar.stop()


def test_lease_keeper_sends_urgent_heartbeats_immediately(url: str, client: BootstrapClient) -> None:
    load = [ReplicaLoad()]
    registrar = ReplicaRegistrar(url, TOKEN, RECORDS, lambda: load[-1], lambda _: None, 3600.0, lambda _: None)
    registrar.start()

    def is_draining() -> bool:
        entry = client.table().find(P0)
        return entry is not None and entry.load.draining

    wait_until(lambda: client.table().find(P0) is not None)
    assert not is_draining()
    load.append(ReplicaLoad(draining=True))
    registrar.hurry()
    wait_until(is_draining)
    registrar.stop()


def test_lease_keeper_refills_a_restarted_service() -> None:
    server = BootstrapServer("127.0.0.1", 0, TOKEN, LEASE_S)
    url = server.start()
    tables: list[TableSnapshot] = []
    registrar = registrar_of(url, tables, [])
    registrar.start()
    wait_until(lambda: tables and is_ready(tables[-1]))
    version = tables[-1].version
    server.stop()
    again = BootstrapServer("127.0.0.1", int(url.rsplit(":", 1)[1]), TOKEN, LEASE_S)
    assert again.start() == url
    wait_until(lambda: tables[-1].version != version and is_ready(tables[-1]))
    again.stop()
    registrar.stop()


def test_lease_keeper_goes_on_after_a_refusal_that_its_own_pause_has_caused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is suspended between the head and the body of a heartbeat, for longer than the service waits."""
    tables: list[TableSnapshot] = []
    registrar = registrar_of(url, tables, [])
    http, statuses = registrar._client._http, list[int]()
    request = http.request

    def late(body: bytes) -> Iterator[bytes]:
        time.sleep(0.5)
        yield body

    def send(method: str, path: str, content: bytes, timeout: float) -> httpx.Response:
        is_late = any(map(is_ready, tables)) and not statuses
        reply = request(method, path, content=late(content) if is_late else content, timeout=timeout)
        if is_late or statuses:
            statuses.append(reply.status_code)
        return reply

    monkeypatch.setattr(BootstrapProtocol, "body_s", 0.1)
    monkeypatch.setattr(http, "request", send)
    registrar.start()
    wait_until(lambda: len(statuses) >= 2)
    registrar.stop()
    assert statuses[:2] == [408, 204]


def test_lease_keeper_of_an_old_start_falls_silent(url: str, client: BootstrapClient) -> None:
    client.register(make_record(P0, 0, CP2, incarnation=7))
    failures: list[Exception] = []
    registrar, follower = registrar_of(url, [], failures), follower_of(url, failures)
    registrar.start()
    follower.start()
    wait_until(lambda: len(failures) >= 2)
    time.sleep(0.2)
    registrar.stop()
    follower.stop()
    refusals = [error for error in failures if isinstance(error, TableRefusedError)]
    assert [error.code for error in refusals] == [RefusalCode.SUPERSEDED] * 2
    entry = client.table().find(P0)
    assert entry is not None
    assert entry.incarnation == 7


@pytest.mark.parametrize("thread", ["lease", "table"])
def test_an_error_that_ends_a_thread_is_reported(url: str, thread: str) -> None:
    failures: list[Exception] = []

    def load() -> ReplicaLoad:
        assert thread != "lease", "a bug"
        return ReplicaLoad()

    def on_table(_: TableSnapshot) -> None:
        if thread == "table":
            raise PeerUnreachableError("a full queue")

    registrar = ReplicaRegistrar(url, TOKEN, RECORDS, load, on_table, 0.05, failures.append)
    registrar.start()
    wait_until(lambda: failures)
    registrar.stop()
    assert type(failures[0]) is (AssertionError if thread == "lease" else PeerUnreachableError)
