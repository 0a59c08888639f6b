"""Network between processes: behaves like ZeroMQ over TCP, and worse where the scenario says so.

The messages of one sender to one address arrive in order and are not lost while both live. Messages to a peer that is
unreachable or not listening wait at the sender. When a sender dies, its queued messages are lost.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from cluster.simulator.scenario import Hazards
from cluster.simulator.timeline import Timeline, Trace
from cluster.spec.messages import Message

HOME = "home"
"""Machine of supervisor, bootstrap and router."""

Deliver = Callable[[Message], None]


def machine_of(address: str) -> str:
    """Return the machine of an address; addresses are ``machine/process``."""
    return address.partition("/")[0]


@dataclass(slots=True)
class _Connection:
    source: str
    address: str
    pending: deque[Message] = field(default_factory=deque)
    last_s: float = 0.0
    """Arrival time of the newest message."""
    num_stalled: int = 0
    """Number of due messages that wait for the peer."""

    @property
    def crosses(self) -> bool:
        return self.source != machine_of(self.address)


class Network:
    """Carries messages and decides which machines can reach each other."""

    def __init__(self, timeline: Timeline, random: Random, hazards: Hazards, trace: Trace) -> None:
        self.happened: Counter[str] = Counter()
        """Messages affected by a hazard, by its name."""
        self._timeline = timeline
        self._random = random
        self._hazards = hazards
        self._trace = trace
        self._listeners: dict[str, Deliver] = {}
        self._connections: dict[tuple[str, str], _Connection] = {}
        self._cuts: Counter[frozenset[str]] = Counter()

    def listen(self, address: str, deliver: Deliver) -> None:
        """Deliver messages to this address from now on, including those that have waited."""
        self._listeners[address] = deliver
        self._resume()

    def unlisten(self, address: str) -> None:
        self._listeners.pop(address, None)

    def end_sender(self, sender: str) -> None:
        """Lose the last messages of a process that died."""
        for key in [key for key in self._connections if key[0] == sender]:
            connection = self._connections.pop(key)
            left = 0 if connection.num_stalled else self._random.randint(0, len(connection.pending))
            while len(connection.pending) > left:
                connection.pending.pop()

    def is_cut(self, machine: str, other: str) -> bool:
        return bool(self._cuts) and frozenset((machine, other)) in self._cuts

    def cut(self, machine: str, other: str) -> None:
        """Separate two machines; cuts are counted."""
        self._cuts[frozenset((machine, other))] += 1

    def heal(self, machine: str, other: str) -> None:
        self._cuts.subtract([frozenset((machine, other))])
        self._cuts += Counter()
        self._resume()

    def delay_s(self, crosses: bool) -> float:
        if not crosses:
            return self._random.uniform(1e-4, 2e-3)
        return self._random.uniform(0.1, 2.0) if self._random.random() < 0.03 else self._random.uniform(2e-4, 2e-2)

    def send(self, sender: str, address: str, message: Message) -> None:
        """Send a message; ``sender`` is a process, named ``machine/process`` too."""
        key = (sender, address)
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = _Connection(machine_of(sender), address)
        if not connection.crosses:
            self._push(connection, message)
            return
        hazards = self._hazards
        if self._is_due(hazards.duplicate, "duplicate"):
            self._later(connection, message)
        if self._is_due(hazards.drop, "drop"):
            self._trace.add("lost on the way from", sender, "to", address, message)
        elif self._is_due(hazards.reorder, "reorder"):
            self._later(connection, message)
        else:
            self._push(connection, message)

    def _is_due(self, rate: float, hazard: str) -> bool:
        if not rate or self._random.random() >= rate:
            return False
        self.happened[hazard] += 1
        return True

    def _later(self, connection: _Connection, message: Message) -> None:
        self._timeline.after(self._random.uniform(0.01, 3.0), partial(self._push, connection, message))

    def _push(self, connection: _Connection, message: Message) -> None:
        connection.pending.append(message)
        now_s = self._timeline.now_s()
        connection.last_s = max(connection.last_s, now_s + self.delay_s(connection.crosses))
        self._timeline.after(connection.last_s - now_s, partial(self._arrive, connection))

    def _arrive(self, connection: _Connection) -> None:
        if not connection.pending:
            return
        deliver = self._listeners.get(connection.address)
        if deliver is None or self.is_cut(connection.source, machine_of(connection.address)):
            connection.num_stalled += 1
            return
        message = connection.pending.popleft()
        self._trace.add(connection.address, "<-", message)
        deliver(message)

    def _resume(self) -> None:
        for connection in list(self._connections.values()):
            num_stalled, connection.num_stalled = connection.num_stalled, 0
            for _ in range(num_stalled):
                self._timeline.after(self._random.uniform(0, 0.1), partial(self._arrive, connection))
