"""Virtual time, the network, and the processes that use them.

Without hazards, the network behaves like ZeroMQ over TCP. Messages from one sender to one address arrive in order and
are not lost while both are alive. Messages to a peer that is unreachable or not listening wait at the sender. When a
sender dies, its queued messages are lost.
"""

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from cluster.simulator.memory import Memory, Text, Tickets
from cluster.simulator.scenario import Hazards, Scenario
from cluster.spec.ids import Room
from cluster.spec.messages import Message, Submit

HOME = "home"
"""Machine on which the supervisor, the bootstrap service and the router run."""
_SHOWN = ("room", "sender_rank", "pages", "num_held_pages", "num_pages", "first_index", "state", "reason")

Event = Callable[[], None]
Deliver = Callable[[Message], None]


class EventQueue:
    """Queue of future events, which run in order of time and take no time themselves."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def now_s(self) -> float:
        return self._now_s

    def after(self, delay_s: float, event: Event) -> None:
        """Schedule an event. Events with equal times run in the order in which they were scheduled."""
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._numbers), event))

    def step(self) -> bool:
        """Run the next event. Return False if there is none."""
        if not self._events:
            return False
        self._now_s, _, event = heapq.heappop(self._events)
        event()
        return True


class Trace:
    """Trace of a run. Nothing is formatted unless tracing is on."""

    def __init__(self, event_queue: EventQueue, is_on: bool) -> None:
        self.lines: list[str] = []
        self._event_queue = event_queue
        self._is_on = is_on

    def add(self, *parts: object) -> None:
        if self._is_on:
            self.lines.append(f"{self._event_queue.now_s():9.4f}  {' '.join(map(_format, parts))}")


def _format(part: object) -> str:
    if not isinstance(part, Message):
        return str(part)
    shown = [f"{name}={getattr(part, name)!s}" for name in _SHOWN if hasattr(part, name)]
    return f"{type(part).__name__}({', '.join(shown)})"


def machine_of(address: str) -> str:
    """Return the machine in an address, which has the form ``machine/process``."""
    return address.partition("/")[0]


@dataclass(slots=True)
class _Connection:
    source: str
    address: str
    pending: deque[Message] = field(default_factory=deque)
    last_s: float = 0.0
    num_stalled: int = 0
    """Number of messages that have arrived and wait for the peer."""

    @property
    def crosses(self) -> bool:
        return self.source != machine_of(self.address)


class Network:
    def __init__(self, event_queue: EventQueue, random: Random, hazards: Hazards, trace: Trace) -> None:
        self.happened: Counter[str] = Counter()
        """Number of messages that each hazard has affected."""
        self._event_queue = event_queue
        self._random = random
        self._hazards = hazards
        self._trace = trace
        self._listeners: dict[str, Deliver] = {}
        self._connections: dict[tuple[str, str], _Connection] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()
        """Number of open faults by (source, target) machine."""

    def listen(self, address: str, deliver: Deliver) -> None:
        """Deliver the messages to this address from now on, including those already waiting."""
        self._listeners[address] = deliver
        self._resume()

    def remove(self, address: str) -> None:
        """Remove a dead process, and lose all of its queued messages or some of the last ones."""
        self._listeners.pop(address, None)
        for key in [key for key in self._connections if key[0] == address]:
            connection = self._connections.pop(key)
            left = 0 if connection.num_stalled else self._random.randint(0, len(connection.pending))
            while len(connection.pending) > left:
                connection.pending.pop()

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether messages from one machine do not reach another."""
        return bool(self._cuts) and (source, target) in self._cuts

    def is_partitioned(self, machine: str, other: str) -> bool:
        """Return whether an exchange in both directions, such as a write with its acknowledgement, fails."""
        return self.is_cut(machine, other) or self.is_cut(other, machine)

    def cut(self, *directions: tuple[str, str]) -> None:
        """Cut each direction, from one machine to another, until all of its cuts have healed."""
        self._cuts.update(directions)

    def heal(self, *directions: tuple[str, str]) -> None:
        self._cuts.subtract(directions)
        self._cuts += Counter()
        self._resume()

    def delay_s(self, crosses: bool) -> float:
        if not crosses:
            return self._random.uniform(1e-4, 2e-3)
        return self._random.uniform(0.1, 2.0) if self._random.random() < 0.03 else self._random.uniform(2e-4, 2e-2)

    def send(self, sender: str, address: str, message: Message) -> None:
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
        self._event_queue.after(self._random.uniform(0.01, 3.0), partial(self._push, connection, message))

    def _push(self, connection: _Connection, message: Message) -> None:
        connection.pending.append(message)
        now_s = self._event_queue.now_s()
        connection.last_s = max(connection.last_s, now_s + self.delay_s(connection.crosses))
        self._event_queue.after(connection.last_s - now_s, partial(self._arrive, connection))

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
                self._event_queue.after(self._random.uniform(0, 0.1), partial(self._arrive, connection))


class Environment:
    """State that all processes of a simulation share."""

    def __init__(self, scenario: Scenario, *, traced: bool) -> None:
        self.scenario, self.shape, self.hazards = scenario, scenario.shape, scenario.hazards
        self.event_queue, self.random = EventQueue(), Random(scenario.seed)
        self.now_s, self.after = self.event_queue.now_s, self.event_queue.after
        self.trace = Trace(self.event_queue, traced)
        self.network = Network(self.event_queue, self.random, scenario.hazards, self.trace)
        self.tickets = Tickets()
        self.memories: dict[str, Memory] = {}
        """Memory of each rank, by session."""
        self.storage: dict[tuple[bytes, str, int, int], bytes] = {}
        """KV of stored pages, by page key, group, head and layer."""
        self.submits: dict[Room, Submit] = {}
        """Submit messages of all attempts so far."""
        self.happened = self.network.happened
        """Number of faults and hazards that occurred, by kind."""
        self.was_quarantined = False
        """Whether too many pages of a replica were in quarantine at some time."""
        self.moved: Counter[str] = Counter()
        """Number of pages moved by tier jobs, and number of early sends, by kind, on all ranks."""
        self._texts: dict[Room, Text] = {}

    def text_of(self, room: Room) -> Text:
        if room not in self._texts:
            self._texts[room] = Text(bytes(self.submits[room].prompt_ids))
        return self._texts[room]


class Loop:
    """Event handling that can freeze. All events that arrived meanwhile run when it continues."""

    def __init__(self) -> None:
        self._num_freezes = 0
        self._waiting: list[Event] = []

    @property
    def is_frozen(self) -> bool:
        return self._num_freezes > 0

    def run(self, event: Event) -> None:
        if self.is_frozen:
            self._waiting.append(event)
        else:
            event()

    def freeze(self) -> None:
        """Freeze until every freeze has ended."""
        self._num_freezes += 1

    def thaw(self) -> None:
        self._num_freezes -= 1
        if not self.is_frozen:
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self.run(event)


class Process(ABC):
    """Process with an address, which can be paused and killed, and whose loop can stall while its threads run."""

    def __init__(self, env: Environment, address: str) -> None:
        self.env = env
        self.address = address
        self.is_dead = False
        self._threads = Loop()
        self._loop = Loop()
        env.network.listen(address, self.receive)

    @abstractmethod
    def receive(self, message: Message) -> None:
        """Handle a message that has arrived."""

    def send(self, address: str, message: Message) -> None:
        self.env.network.send(self.address, address, message)

    def when_running(self, event: Event) -> None:
        """Run an event in the process's loop, now or when it continues, unless the process is dead."""
        self.in_thread(partial(self._loop.run, partial(self._unless_dead, event)))

    def in_thread(self, event: Event) -> None:
        """Run an event in a thread of the process, which goes on while the loop is stalled."""
        self._threads.run(partial(self._unless_dead, event))

    def after(self, delay_s: float, event: Event) -> None:
        self.env.after(delay_s, partial(self.when_running, event))

    def every(self, interval_s: float, event: Event, run: Callable[[Event], None] | None = None) -> None:
        """Run an event regularly in the loop, or by ``run``."""
        (run or self.when_running)(event)
        if not self.is_dead:
            self.env.after(interval_s, partial(self.every, interval_s, event, run))

    def pause(self) -> None:
        self._threads.freeze()

    def resume(self) -> None:
        self._threads.thaw()

    @property
    def is_stalled(self) -> bool:
        return self._loop.is_frozen

    def stall(self) -> None:
        self._loop.freeze()

    def proceed(self) -> None:
        self._loop.thaw()

    def kill(self) -> None:
        self.env.trace.add(self.address, "dies")
        self.is_dead = True
        self.env.network.remove(self.address)

    def _unless_dead(self, event: Event) -> None:
        if not self.is_dead:
            event()
