"""Driver in virtual time. The supervisor's real rules decide which members start and end."""

from collections.abc import Callable
from functools import partial
from itertools import count

from cluster.bootstrap.table import BootstrapTable
from cluster.launch.services import BOOTSTRAP
from cluster.launch.waits import DrainWatch
from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.environment import HOME, Environment, Loop, Process
from cluster.simulator.environment import Event as Task
from cluster.simulator.leaders import make_records
from cluster.simulator.memory import Violation
from cluster.simulator.replica import Replica
from cluster.simulator.router_process import RouterProcess
from cluster.spec.clock import HEARTBEAT_S, LEASE_S
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import ROUTER, Incarnation, ReplicaId
from cluster.spec.messages import Drain, Resume
from cluster.spec.registry import TableSnapshot
from cluster.supervisor import events
from cluster.supervisor.commands import OperatorCommand
from cluster.supervisor.events import Action, Event
from cluster.supervisor.reconcile import reconcile
from cluster.supervisor.state import Cluster, ClusterPhase, Member, MemberState, Now

BACKOFF_S = 0.5
_PATIENCE_S = 4.0
_READY_S = 0.5
_START_TIMEOUT_S = 6.0
_MAX_LATE_S = 6.0
"""Maximum delay until the driver sees in the table that a started replica is ready. It is longer than a lease."""
_RETRY_S = 1.0
DRAIN_S = 60.0
"""Maximum time for the open requests of a draining replica to end."""
_POLL_S = 0.5
_STEP_TIMEOUT_S = 8.0
"""Time after which a rank that hangs ends itself, as ``workers.loop.watch`` does."""
_CONVICTION_S = 3.0
"""Time of regular heartbeats after which the supervisor must not take a replica for silent."""


class Driver:
    """Driver whose process can stall. Its calls to other processes then wait too."""

    def __init__(self, env: Environment) -> None:
        self.bootstrap = Bootstrap(env)
        self.router: RouterProcess | None = None
        self.replicas: dict[str, Replica] = {}
        self.open_commands: set[int] = set()
        """Numbers of the commands without a final answer."""
        self._unproven: dict[tuple[str, Incarnation], Replica] = {}
        """Replicas that were ended while their machine was unreachable, and may still be running."""
        self._env = env
        self._loop = Loop()
        self._machines = count()
        self._commands = count()
        self._cluster = Cluster(
            members={name: Member(name=name) for name in env.scenario.members},
            backoff_s=BACKOFF_S,
            patience_s=_PATIENCE_S,
        )
        self._seen_version = 0
        self.post(events.Tick())
        self._follow_table()
        self._follow_router(responded=True)

    @property
    def is_serving(self) -> bool:
        """Return whether exactly the desired members are running."""
        are_settled = all(member.is_settled for member in self._cluster.members.values())
        return self._cluster.phase is ClusterPhase.SERVING and are_settled

    @property
    def running(self) -> dict[str, Replica]:
        members = self._cluster.members
        return {name: it for name, it in self.replicas.items() if members[name].state is MemberState.RUNNING}

    @property
    def is_stopped(self) -> bool:
        return self._cluster.phase is ClusterPhase.STOPPED

    def post(self, event: Event) -> None:
        self._loop.run(partial(self._handle, event))

    def stall(self, member: str, rank: int) -> Callable[[], None]:
        """Stall a process; return a function that lets it proceed. A rank that stalls for too long ends itself."""
        if member == "driver":
            self._loop.freeze()
            return self._loop.thaw
        if member == BOOTSTRAP:
            return self.bootstrap.stall()
        if member == ROUTER:
            process: Process | None = self.router
        else:
            replica = self.replicas[member]
            process = replica.ranks[rank % len(replica.ranks)]
            self._env.after(_STEP_TIMEOUT_S, partial(self._watch_loop, replica, rank, process))
        if process is None:
            return lambda: None
        process.stall()
        return process.proceed

    def _watch_loop(self, replica: Replica, rank: int, process: Process) -> None:
        if process.is_stalled:
            replica.kill_rank(rank)

    def _handle(self, event: Event) -> None:
        now = Now(s=self._env.now_s(), unix_ms=int(self._env.now_s() * 1000))
        self._cluster, actions = reconcile(self._cluster, event, now)
        for action in actions:
            self._env.trace.add("supervisor:", action)
            self._carry_out(action)
        wake_s = self._cluster.next_wake_s()
        if wake_s is not None:
            # Slightly late, in case of rounding errors.
            self._after(max(0.0, wake_s - now.s) + 1e-6, partial(self._wake, wake_s))

    def report_failed(self, name: str, incarnation: Incarnation, reason: str) -> None:
        self._post_later(2.0, events.Failed(name, incarnation, BatonError(reason)))

    def _post_later(self, longest_s: float, event: Event) -> None:
        self._after(self._env.random.uniform(0.05, longest_s), partial(self.post, event))

    def submit(self, command: OperatorCommand) -> None:
        number = next(self._commands)
        self.open_commands.add(number)
        self.post(events.CommandReceived(number, command))

    def fail_member(self, name: str) -> None:
        self.report_failed(name, self._cluster.members[name].incarnation, "its process died")

    def _after(self, delay_s: float, task: Task) -> None:
        self._env.after(delay_s, partial(self._loop.run, task))

    def _follow_table(self) -> None:
        """Ask for the table again and again, as ``cluster.cli.up`` does."""
        seen: list[TableSnapshot] = []

        def read(table: BootstrapTable, now_s: float) -> None:
            seen.append(table.snapshot(now_s))

        def on_answer(answer: BatonError | None) -> None:
            if answer is not None:
                self.post(events.TableLost())
            elif seen[0].version == self._seen_version:
                self.post(events.TableUnchanged())
            else:
                self._seen_version = seen[0].version
                self.post(events.TableSeen.of(seen[0]))
            self._after(_POLL_S, self._follow_table)

        self.bootstrap.call(HOME, read, lambda answer: self._loop.run(partial(on_answer, answer)))

    def _follow_router(self, responded: bool) -> None:
        """Check the router, as ``cluster.launch.services.follow_router`` does."""
        is_over = False

        def end(responds: bool) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            if not (responded and responds):
                self.post(events.RouterSeen(ROUTER, responds))
            self._after(HEARTBEAT_S, partial(self._follow_router, responds))

        if self.router is None or self.router.is_dead:
            end(False)
        else:
            self.router.when_running(partial(self._loop.run, partial(end, True)))
            self._after(LEASE_S, partial(end, False))

    def _wake(self, wake_s: float) -> None:
        if self._cluster.next_wake_s() == wake_s:
            self.post(events.Tick())

    def _examine(self, name: str, incarnation: Incarnation) -> None:
        replica = self.replicas.get(name)
        if replica is not None and (lasts_s := replica.leader.life.lasts_s()) > _CONVICTION_S:
            raise Violation(f"{name} is taken for silent, but has sent heartbeats for {lasts_s:.1f} s")
        self._post_later(2.0, events.Examined(name, incarnation, True))

    def _carry_out(self, action: Action) -> None:
        random = self._env.random
        match action:
            case events.Start(name, incarnation):
                self._after(random.uniform(0.1, 1.5), partial(self._start, name, incarnation))
            case events.End(name, incarnation):
                self._post_later(0.5, events.Ended(name, incarnation, self._end(name, incarnation)))
            case events.Examine(name, incarnation):
                self._examine(name, incarnation)
            case events.Prove(name, incarnation):
                self._prove(name, incarnation)
            case events.MarkEnded(name, incarnation, proven):
                self._mark_ended(ReplicaId(name), incarnation, proven)
            case events.DrainReplica(name, incarnation):
                self.replicas[name].leader.receive(Drain())
                watch = DrainWatch(ReplicaId(name), incarnation)
                self._wait_drained(watch, name, incarnation, self._env.now_s() + DRAIN_S)
            case events.Place():
                self._after(random.uniform(0.01, 0.1), partial(self.post, events.Placed(None)))
            case events.ResumeReplica(name, incarnation):
                self.replicas[name].leader.receive(Resume())
                self._post_later(2.0, events.ReplicaResumed(name, incarnation, True))
            case events.CommandAnswer(number, _, outcome) if outcome is not events.Outcome.GOING_ON:
                self.open_commands.discard(number)
            case events.DrainCluster():
                self._post_later(0.5, events.ClusterDrained(self.router is not None and self.router.is_idle))
            case events.Stop():
                self._stop()

    def _wait_drained(self, watch: DrainWatch, name: str, incarnation: Incarnation, end_s: float) -> None:
        """Wait until a replica is drained, as ``cluster.launch.waits`` does."""
        now_s = self._env.now_s()
        watch.saw(self.bootstrap.snapshot(), now_s)
        if watch.is_over(now_s) or now_s >= end_s:
            self.post(events.ReplicaDrained(name, incarnation, watch.is_over(now_s)))
        else:
            self._after(_POLL_S, partial(self._wait_drained, watch, name, incarnation, end_s))

    def _start(self, name: str, incarnation: Incarnation) -> None:
        if name not in (BOOTSTRAP, ROUTER):
            records = make_records(self._env.shape, ReplicaId(name), incarnation, self._machine_for(name))
            on_failed = partial(self.report_failed, name, incarnation)
            self.replicas[name] = Replica(self._env, self.bootstrap, records, on_failed)
            self._wait_ready(name, incarnation, self._env.now_s() + _START_TIMEOUT_S)
            return
        if name == BOOTSTRAP:
            self.bootstrap.start()
        else:
            self.router = RouterProcess(self._env, self.bootstrap, incarnation)
        self._after(_READY_S, partial(self.post, events.Started(name, incarnation)))

    def _wait_ready(self, name: str, incarnation: Incarnation, end_s: float) -> None:
        """Wait until a replica is ready, as ``cluster.launch.gang`` does. Half of the checks are delayed."""

        def poll() -> None:
            snapshot = self.bootstrap.snapshot()
            entry = snapshot.find(ReplicaId(name)) if snapshot is not None else None
            if entry is not None and entry.ready and entry.incarnation == incarnation:
                self.post(events.Started(name, incarnation))
            elif self._env.now_s() >= end_s:
                self.post(events.Failed(name, incarnation, BatonError("not ready in the rank table in time")))
            else:
                self._wait_ready(name, incarnation, end_s)

        random = self._env.random
        self._after(random.choice((_READY_S, random.uniform(_READY_S, _MAX_LATE_S))), poll)

    def _machine_for(self, name: str) -> str:
        """Return the replica's previous machine, or a new one if an earlier incarnation may still be running there."""
        machine = self.replicas[name].machine if name in self.replicas else name
        is_taken = any(replica.machine == machine for replica in self._unproven.values())
        return f"{name}@{next(self._machines)}" if is_taken else machine

    def _end(self, name: str, incarnation: Incarnation) -> bool:
        if name == BOOTSTRAP:
            self.bootstrap.kill()
        elif name == ROUTER and self.router is not None:
            self.router.kill()
        elif name in self.replicas and self._env.network.is_partitioned(self.replicas[name].machine, HOME):
            self._unproven[name, incarnation] = self.replicas[name]
            return False
        elif name in self.replicas:
            self.replicas[name].kill()
        return True

    def _stop(self) -> None:
        self.bootstrap.kill()
        for member in (self.router, *self.replicas.values()):
            if member is not None:
                member.kill()
        self._post_later(0.5, events.Stopped())

    def _prove(self, name: str, incarnation: Incarnation) -> None:
        replica = self._unproven[name, incarnation]
        if self._env.network.is_partitioned(replica.machine, HOME):
            self._after(_RETRY_S, partial(self._prove, name, incarnation))
        else:
            replica.kill()
            del self._unproven[name, incarnation]
            self.post(events.Proven(name, incarnation))

    def _mark_ended(self, replica: ReplicaId, incarnation: Incarnation, proven: bool) -> None:
        def request(table: BootstrapTable, _: float) -> None:
            table.unregister(replica, incarnation, reaped=proven)

        def on_answer(answer: BatonError | None) -> None:
            if isinstance(answer, PeerUnreachableError):
                self._after(_RETRY_S, partial(self._mark_ended, replica, incarnation, proven))

        self.bootstrap.call(HOME, request, lambda answer: self._loop.run(partial(on_answer, answer)))
