"""Both real backends between two processes: bytes arrive before write returns, and a lost peer is an error."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError, UserError
from cluster.spec.registry import Endpoint
from transfer.backends import shared_memory
from transfer.backends.interface import Region, TransferBackend
from transfer.backends.registry import make_backend
from transfer.page_range import Span

pytestmark = pytest.mark.integration

SIZE = 8 << 20
ROOT = Path(__file__).parents[2]
BACKENDS = [
    TransferBackendName.SHARED_MEMORY,
    pytest.param(TransferBackendName.MOONCAKE, marks=pytest.mark.mooncake),
]


class Peer:
    """Process that owns a region."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        assert process.stdout
        self.process = process
        self._to, self._from = process.stdin, process.stdout
        self.endpoint = msgspec.json.decode(self._from.readline(), type=Endpoint)

    def ask(self, question: str) -> str:
        self._to.write(f"{question}\n")
        self._to.flush()
        return self._from.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def _peer(name: TransferBackendName) -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.integration.transfer_peer", name, str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> TransferBackendName:
    return TransferBackendName(request.param)


@pytest.fixture
def backend(name: TransferBackendName) -> Iterator[TransferBackend]:
    backend = make_backend(name, "127.0.0.1")
    yield backend
    backend.close()


@pytest.fixture
def source(backend: TransferBackend) -> Region:
    region = backend.allocate(SIZE)
    region.buffer[:] = random.Random(1).randbytes(SIZE)
    return region


def _scattered_spans() -> list[Span]:
    """Return 1,500 spans of many sizes that permute the region's pieces."""
    rng = random.Random(2)
    cuts = sorted(rng.sample(range(1, SIZE), 1499))
    pieces = list(zip([0, *cuts], [*cuts, SIZE], strict=True))
    target_offset, spans = 0, []
    for start, end in rng.sample(pieces, len(pieces)):
        spans.append(Span(start, target_offset, end - start))
        target_offset += end - start
    return spans


def test_bytes_are_there_when_write_returns(
    name: TransferBackendName, backend: TransferBackend, source: Region
) -> None:
    spans = _scattered_spans()
    expected = bytearray(SIZE)
    for source_offset, target_offset, num_bytes in spans:
        expected[target_offset : target_offset + num_bytes] = source.buffer[source_offset : source_offset + num_bytes]
    with _peer(name) as peer:
        assert peer.ask("digest") == hashlib.sha256(bytes(SIZE)).hexdigest()
        backend.write(source, peer.endpoint, spans)
        assert peer.ask("digest") == hashlib.sha256(expected).hexdigest()
        backend.write(source, peer.endpoint, [Span(0, 0, SIZE)])
        assert peer.ask("digest") == hashlib.sha256(source.buffer).hexdigest()


def test_a_peer_that_closed_or_died_is_an_error(
    name: TransferBackendName, backend: TransferBackend, source: Region
) -> None:
    with _peer(name) as peer:
        assert peer.ask("close") == "closed"
        with pytest.raises(TransferError):
            backend.write(source, peer.endpoint, [Span(0, 0, 4096)])
    with _peer(name) as peer:
        peer.kill()
        with pytest.raises(TransferError):
            backend.write(source, peer.endpoint, [Span(0, 0, 4096)])
        backend.drain(peer.endpoint)
        backend.forget(peer.endpoint)
    with _peer(name) as peer:
        backend.write(source, peer.endpoint, [Span(0, 0, SIZE)])
        assert peer.ask("digest") == hashlib.sha256(source.buffer).hexdigest()


@pytest.mark.mooncake
@pytest.mark.full
def test_a_drained_peer_gets_no_more_bytes_of_a_failed_write() -> None:
    mooncake = TransferBackendName.MOONCAKE
    backend, num_bytes = make_backend(mooncake, "127.0.0.1"), SIZE // 256
    source = backend.allocate(SIZE)
    source.buffer[:] = b"x" * SIZE
    with closing(backend), _peer(mooncake) as peer:
        backend.write(source, peer.endpoint, [Span(0, 0, num_bytes)])
        peer.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError):
            backend.write(source, peer.endpoint, [Span(at, at, num_bytes) for at in range(0, SIZE, num_bytes)])
        draining = threading.Thread(target=backend.drain, args=[peer.endpoint])
        draining.start()
        draining.join(1.0)
        assert draining.is_alive(), "nothing was left to drain"
        peer.process.send_signal(signal.SIGCONT)
        draining.join(60.0)
        then = peer.ask("digest")
        time.sleep(1.0)
        assert peer.ask("digest") == then


def test_spans_outside_a_region_are_refused(
    name: TransferBackendName, backend: TransferBackend, source: Region
) -> None:
    with _peer(name) as peer:
        for span in (Span(0, SIZE - 1, 2), Span(SIZE - 1, 0, 2), Span(-1, 0, 2), Span(0, -1, 2), Span(0, 0, -1)):
            with pytest.raises(TransferError, match="exceeds the"):
                backend.write(source, peer.endpoint, [Span(0, 0, 1), span])
        assert peer.ask("digest") == hashlib.sha256(bytes(SIZE)).hexdigest()


def test_the_main_thread_runs_while_a_write_does(
    name: TransferBackendName, backend: TransferBackend, source: Region
) -> None:
    with _peer(name) as peer:
        backend.write(source, peer.endpoint, [Span(0, 0, SIZE)])

        def write_often() -> None:
            for _ in range(20):
                backend.write(source, peer.endpoint, [Span(0, 0, SIZE)])

        writer = threading.Thread(target=write_often)
        gaps_s, last_s = [], time.perf_counter()
        writer.start()
        while writer.is_alive():
            now_s = time.perf_counter()
            gaps_s.append(now_s - last_s)
            last_s = now_s
        writer.join()
        assert len(gaps_s) > 1000, "the main thread was held up by the writes"


def test_regions_are_zero_and_outlive_close(backend: TransferBackend) -> None:
    region = backend.allocate(1 << 16)
    assert not any(region.buffer)
    backend.close()
    backend.close()
    region.buffer[:4] = b"baton"[:4]
    assert bytes(region.buffer[:4]) == b"bato"


def test_shared_memory_is_unnamed_and_freed_with_its_owner() -> None:
    with _peer(TransferBackendName.SHARED_MEMORY) as peer:
        path, name = peer.endpoint.session.split()
        assert Path(path).readlink() == Path(f"/memfd:{name} (deleted)")
        assert not any(name in entry.name for entry in Path("/dev/shm").iterdir())
        peer.kill()
        assert not Path(path).exists()


def test_shared_memory_that_does_not_fit_is_refused_with_a_reason() -> None:
    backend = shared_memory.SharedMemoryBackend()
    with pytest.raises(
        UserError, match=r"^cannot allocate 1152921504606846976 bytes of shared memory: \d+ are available$"
    ):
        backend.allocate(1 << 60)
    backend.close()


def test_shared_memory_opens_only_the_named_region(tmp_path: Path) -> None:
    backend = shared_memory.SharedMemoryBackend()
    source = backend.allocate(4096)
    right = backend.allocate(8192).endpoint
    path, _ = right.session.split()
    victim = tmp_path / "notes.txt"
    victim.write_bytes(bytes(4096))
    with victim.open("r+b") as file:
        wrong = {
            str(victim): "is not the name of a shared memory region",
            f"/proc/{os.getpid()}/fd/{file.fileno()} baton-{0:016x}": "is no longer the region",
            f"{path} baton-{0:016x}": "is no longer the region",
            f"/proc/{os.getpid()}/fd/999999 baton-{0:016x}": "No such file or directory; is its owner alive",
        }
        for session, message in wrong.items():
            with pytest.raises(TransferError, match=message):
                backend.write(source, msgspec.structs.replace(right, session=session), [Span(0, 0, 8)])
    with pytest.raises(TransferError, match="has 8192 bytes, but its owner announced 4096"):
        backend.write(source, msgspec.structs.replace(right, num_bytes=4096), [Span(0, 0, 8)])
    backend.write(source, right, [Span(0, 0, 8)])
    backend.close()


def test_a_missing_mooncake_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    monkeypatch.delitem(sys.modules, "transfer.backends.mooncake", raising=False)
    with pytest.raises(UserError, match="`baton doctor` shows what is missing"):
        make_backend(TransferBackendName.MOONCAKE, "127.0.0.1")


@pytest.mark.parametrize("name", BACKENDS[1:], indirect=True)
def test_mooncake_without_acknowledgement_is_refused(
    name: TransferBackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(UserError, match="MC_TCP_PROTO is 1"):
        make_backend(name, "127.0.0.1")
