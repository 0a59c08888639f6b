"""Workers that fail on request. A fault is a file that the first affected worker consumes.

The worker leaves a proof of each fault in the same folder.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from unittest.mock import patch

from cluster.channel import Outbox
from cluster.launch.kinds import WorkerActor
from cluster.logs import ProcessLog
from cluster.spec.ids import Room
from cluster.spec.kv import PoolLayout
from cluster.spec.messages import Message, Outputs
from cluster.spec.registry import Endpoint
from cluster.spec.sampling import Sampled
from cluster.spec.transfer_messages import Done, PageDigests
from transfer.backends.interface import Region
from transfer.backends.shared_memory import SharedMemoryBackend
from transfer.page_range import Span, total_bytes, wrong_pages

FOLDER = "BATON_TEST_FAULTS"
"""Environment variable with the folder in which faults are requested."""
DELAY_S = 2.0
_PROOFS = "proofs"

Write = Callable[[Region, Endpoint, Sequence[Span]], None]


class Fault(StrEnum):
    """Fault between prefill and decode, between decode and router, or in a rank."""

    DROP = "drop"
    """Nothing of a write arrives, and the sender considers it complete."""
    FAIL = "fail"
    """A write fails, and the sender sees the error."""
    DELAY = "delay"
    """A write takes two seconds longer."""
    TRUNCATE = "truncate"
    """Half of a write arrives, and the sender considers it complete."""
    FLIP = "flip"
    """One bit arrives flipped."""
    REPEAT = "repeat"
    """A notification arrives twice in a row, and again before the next one, when its request has proceeded."""
    LOSE = "lose"
    """A notification does not arrive."""
    MUTE = "mute"
    """The last tokens of a stream do not arrive."""
    HANG = "hang"
    """The main thread of a rank hangs while it waits for the end of a step."""
    ZERO = "zero"
    """A page amid a handoff is zeroed after its digest was checked, so that decode uses it and no check notices."""


def order(folder: Path, fault: Fault, times: int) -> None:
    """Request a fault a number of times."""
    for number in range(times):
        (folder / f"{fault}-{number}").touch()


def proofs(folder: Path) -> list[str]:
    """Return the proofs of the faults so far."""
    path = folder / _PROOFS
    return path.read_text().splitlines() if path.exists() else []


class FaultyWorker(WorkerActor):
    """Worker with injectable faults."""

    def __init__(self, log: ProcessLog, environ: Mapping[str, str]) -> None:
        super().__init__(log, environ)
        saboteur = Saboteur(Path(os.environ[FOLDER]))
        saboteur.spoil_writes()
        saboteur.spoil_notifications()
        saboteur.spoil_steps()
        saboteur.spoil_checked_pages()


class Saboteur:
    """Patches of this process's classes that inject the faults requested in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._repeated: tuple[str, Done] | None = None

    def spoil_writes(self) -> None:
        """Inject faults between the sender and its backend."""
        real = SharedMemoryBackend.write

        def write(backend: SharedMemoryBackend, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
            self._write(real.__get__(backend), source, target, spans)

        patch.object(SharedMemoryBackend, "write", write).start()

    def spoil_notifications(self) -> None:
        """Inject faults between the sender and its channel."""
        real = Outbox.send

        def send(outbox: Outbox, address: str, message: Message) -> None:
            if isinstance(message, Done):
                self._send(real.__get__(outbox), address, message)
            elif not self._mutes(message):
                real(outbox, address, message)

        patch.object(Outbox, "send", send).start()

    def spoil_steps(self) -> None:
        """Inject faults into the rank's part of a step."""
        from workers.engine.begun_step import BegunStep

        real = BegunStep.wait

        def wait(step: BegunStep) -> dict[Room, Sampled]:
            if self._takes(Fault.HANG, "the end of a step: never arrives"):
                threading.Event().wait()
            return real(step)

        patch.object(BegunStep, "wait", wait).start()

    def spoil_checked_pages(self) -> None:
        """Inject faults between the check of received pages and their use."""

        def check(pool: memoryview, layout: PoolLayout, reported: Sequence[PageDigests]) -> list[int]:
            wrong = wrong_pages(pool, layout, reported)
            pages = reported[0].pages
            page = pages[len(pages) // 2]
            if self._takes(Fault.ZERO, f"page {page}: zeroed after its check"):
                pool[page * layout.page_bytes : (page + 1) * layout.page_bytes] = bytes(layout.page_bytes)
            return wrong

        patch("workers.handoff.page_checker.wrong_pages", check).start()

    def _write(self, write: Write, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        what = f"a write of {len(spans)} spans, {total_bytes(spans)} bytes"
        if self._takes(Fault.DROP, f"{what}: nothing written"):
            return
        if self._takes(Fault.FAIL, f"{what}: failed"):
            raise ConnectionResetError("the transport failed")
        if self._takes(Fault.TRUNCATE, f"{what}: half of the last span left out"):
            last = spans[-1]
            spans = [*spans[:-1], last._replace(num_bytes=last.num_bytes // 2)]
        if self._takes(Fault.DELAY, f"{what}: delayed by {DELAY_S:g} s"):
            time.sleep(DELAY_S)
        write(source, target, spans)
        if self._takes(Fault.FLIP, f"{what}: one bit changed"):
            first = spans[0]
            wrong = bytearray([source.buffer[first.source_offset] ^ 1])
            write(Region(memoryview(wrong), source.endpoint), target, [Span(0, first.target_offset, 1)])

    def _send(self, send: Callable[[str, Message], None], address: str, done: Done) -> None:
        if self._repeated is not None:
            send(*self._repeated)
            self._repeated = None
        if self._takes(Fault.LOSE, f"Done of room {done.room}: not sent"):
            return
        send(address, done)
        if self._takes(Fault.REPEAT, f"Done of room {done.room}: sent three times"):
            send(address, done)
            self._repeated = address, done

    def _mutes(self, message: Message) -> bool:
        if not isinstance(message, Outputs):
            return False
        rooms = [output.room for output in message.outputs if output.finish is not None]
        return bool(rooms) and self._takes(Fault.MUTE, f"last tokens of rooms {rooms}: not sent")

    def _takes(self, fault: Fault, proof: str) -> bool:
        """Return whether this fault is requested. Each request is consumed by one worker."""
        for path in self._folder.glob(f"{fault}-*"):
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            with (self._folder / _PROOFS).open("a") as file:
                file.write(f"process {os.getpid()}: {proof}\n")
            return True
        return False
