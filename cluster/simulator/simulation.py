"""Simulation of one scenario, from the start of the cluster to its stop."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.launch.services import BOOTSTRAP
from cluster.simulator.driver import Driver
from cluster.simulator.environment import HOME, Environment
from cluster.simulator.memory import Violation
from cluster.simulator.promises import Client, End
from cluster.simulator.replica import Replica
from cluster.simulator.scenario import MACHINE_LOST_S, Fault, FaultKind, Scenario
from cluster.spec.ids import ROUTER, ReplicaId, Role
from cluster.spec.messages import Drain
from cluster.supervisor.commands import DrainCommand, OperatorCommand, RestartCommand, ResumeCommand, ScaleCommand
from cluster.supervisor.events import StopRequested

_START_LIMIT_S = 60.0
_SLACK_S = 60.0
"""Time after the last deadline for restarts with their backoff and for late messages."""
_POLL_S = 0.5


class Faults:
    def __init__(self, env: Environment, driver: Driver) -> None:
        self.num_open = len(env.scenario.faults)
        self._env = env
        self._driver = driver
        for fault in env.scenario.faults:
            env.after(fault.at_s, partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        self._env.trace.add("fault:", fault.kind, fault.member, fault.other)
        self._env.happened[fault.kind] += 1
        match fault.kind:
            case FaultKind.KILL:
                self._kill(fault)
            case FaultKind.PAUSE:
                self._end_after(fault.duration_s, self._pause(self._driver.replicas[fault.member]))
            case FaultKind.PARTITION:
                self._partition(self._machine(fault.member), self._machine(fault.other), fault.duration_s)
            case FaultKind.ONE_WAY:
                self._cut(fault.duration_s, (self._machine(fault.member), self._machine(fault.other)))
            case FaultKind.LOSE_MACHINE:
                self._lose_machine(fault)
            case FaultKind.STALL:
                self._end_after(fault.duration_s, self._driver.stall(fault.member, fault.rank))
            case FaultKind.HANG:
                self._driver.stall(fault.member, fault.rank)
                self._end_fault()
            case FaultKind.DRAIN:
                self._driver.replicas[fault.member].leader.receive(Drain())
                self._end_fault()
            case FaultKind.RESTART:
                self._command(RestartCommand(replicas=(ReplicaId(fault.member),), is_rolling=True))
            case FaultKind.SCALE:
                role, _, index = fault.member.partition("-")
                self._command(ScaleCommand(**{role: int(index) + 1}))
            case FaultKind.STAND_BY:
                self._driver.submit(DrainCommand(replica=ReplicaId(fault.member)))
                resume = partial(self._command, ResumeCommand(replica=ReplicaId(fault.member)))
                self._env.after(fault.duration_s, resume)

    def _command(self, command: OperatorCommand) -> None:
        self._driver.submit(command)
        self._end_fault()

    def _kill(self, fault: Fault) -> None:
        driver = self._driver
        if fault.member == BOOTSTRAP:
            driver.bootstrap.kill()
            driver.fail_member(fault.member)
        elif fault.member == ROUTER:
            if driver.router is not None and not driver.router.is_dead:
                driver.router.kill()
                driver.fail_member(fault.member)
        else:
            driver.replicas[fault.member].kill_rank(fault.rank)
        self._end_fault()

    def _pause(self, replica: Replica) -> Callable[[], None]:
        """Pause all processes; return a function that resumes them."""
        for rank in replica.ranks:
            rank.pause()

        def resume() -> None:
            for rank in replica.ranks:
                rank.resume()

        return resume

    def _lose_machine(self, fault: Fault) -> None:
        replica, random = self._driver.replicas[fault.member], self._env.random
        lost_s = random.uniform(1, MACHINE_LOST_S) + fault.duration_s
        self._partition(replica.machine, HOME, lost_s)
        if random.random() < 0.5:
            resume = self._pause(replica)
            self._env.after(random.uniform(0, lost_s), resume)

    def _partition(self, machine: str, other: str, duration_s: float) -> None:
        self._cut(duration_s, (machine, other), (other, machine))

    def _cut(self, duration_s: float, *directions: tuple[str, str]) -> None:
        self._env.network.cut(*directions)
        self._end_after(duration_s, partial(self._env.network.heal, *directions))

    def _machine(self, member: str) -> str:
        return HOME if member == HOME else self._driver.replicas[member].machine

    def _end_after(self, duration_s: float, undo: Callable[[], None]) -> None:
        def end() -> None:
            undo()
            self._end_fault()

        self._env.after(duration_s, end)

    def _end_fault(self) -> None:
        self.num_open -= 1


@dataclass(frozen=True, slots=True)
class Outcome:
    violation: str | None
    ends: Counter[str]
    happened: Counter[str]
    """Number of faults and hazards that occurred, by kind."""
    moved: Counter[str]
    """Number of pages moved by tier jobs, and number of early sends, by kind."""
    trace: list[str]
    virtual_s: float


class Simulation:
    def __init__(self, scenario: Scenario, traced: bool = False) -> None:
        self._scenario = scenario
        self._env = Environment(scenario, traced=traced)
        self._driver = Driver(self._env)
        self._clients = [Client(request) for request in scenario.requests]
        self._limit_s = _START_LIMIT_S
        self._faults: Faults | None = None

    def run(self) -> Outcome:
        """Run until nothing is open or a promise is broken. Any error in the code under test counts as a violation."""
        violation = None
        try:
            if not self._run_until(self._is_up):
                raise Violation("the cluster did not start")
            self._begin()
            if not self._run_until(lambda: not self._left_over()):
                raise Violation(f"still open at the time limit: {', '.join(self._left_over())}")
            self._check_ends()
            self._check_known_pages()
            self._driver.post(StopRequested("the scenario is over"))
            if not self._run_until(lambda: self._driver.is_stopped):
                raise Violation("the cluster did not stop")
        except Exception as error:  # an error of any type
            violation = f"{type(error).__name__}: {error}"
        ends = Counter(str(client.end) for client in self._clients)
        env = self._env
        return Outcome(violation, ends, +env.happened, env.moved, env.trace.lines, env.now_s())

    def _begin(self) -> None:
        scenario, now_s = self._scenario, self._env.now_s()
        for client in self._clients:
            self._env.after(client.request.at_s, partial(self._send_request, client))
        self._faults = Faults(self._env, self._driver)
        shape = scenario.shape
        ends_s = [fault.at_s + fault.duration_s for fault in scenario.faults]
        last_s = max([request.at_s for request in scenario.requests] + ends_s)
        self._limit_s = (
            now_s + last_s + scenario.request_timeout_s + shape.transfer_timeout_s + MACHINE_LOST_S + _SLACK_S
        )

    def _send_request(self, client: Client) -> None:
        router = self._driver.router
        if router is None or router.is_dead:
            client.finish(End.DISCONNECTED, "connection refused")
        else:
            router.connect(client)

    def _run_until(self, is_reached: Callable[[], bool]) -> bool:
        """Run events until a condition holds. Return False if the time limit is reached first."""
        poll_s = 0.0
        while self._env.now_s() < self._limit_s:
            if self._env.now_s() >= poll_s:
                if is_reached():
                    return True
                poll_s = self._env.now_s() + _POLL_S
            self._env.event_queue.step()
        return False

    def _is_up(self) -> bool:
        router, shape = self._driver.router, self._scenario.shape
        if router is None or not self._driver.is_serving:
            return False
        numbers = {Role.PREFILL: shape.num_prefill, Role.DECODE: shape.num_decode}
        return all(len(router.directory.ready(role)) == number for role, number in numbers.items())

    def _left_over(self) -> list[str]:
        assert self._faults is not None
        driver = self._driver
        left = [f"{self._faults.num_open} faults"] if self._faults.num_open else []
        left += [f"request {number}" for number, client in enumerate(self._clients) if client.end is None]
        if not driver.is_serving:
            left.append("members that have not restarted")
        if driver.router is None or not driver.router.is_idle:
            left.append("requests in the router")
        left += [f"command {number}" for number in driver.open_commands]
        left += [name for name, replica in driver.running.items() if not replica.is_idle]
        return left

    def _check_known_pages(self) -> None:
        """Check the router's index, unless KV events may have been duplicated or reordered."""
        hazards, router = self._scenario.hazards, self._driver.router
        if hazards.duplicate or hazards.reorder or router is None:
            return
        for replica in self._driver.running.values():
            router.known_pages.check(replica.leader)

    def _check_ends(self) -> None:
        scenario = self._scenario
        # While another member pauses, the pages of a healthy replica can stay in quarantine.
        if not scenario.is_calm and (not scenario.is_mild or self._env.was_quarantined):
            return
        why = "nothing failed" if scenario.is_calm else "a replica of each role had no fault"
        for number, client in enumerate(self._clients):
            if client.end not in (End.FINISHED, End.LEFT):
                raise Violation(f"{why}, but request {number} ended as {client.end}: {client.reason}")
        if scenario.is_calm and (router := self._driver.router) is not None:
            num_repeated = router.requests.num_restarts + router.requests.num_continuations
            if num_repeated:
                raise Violation(f"{why}, but {num_repeated} attempts were repeated")
