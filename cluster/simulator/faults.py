"""Injector of a scenario's faults."""

from functools import partial

from cluster.simulator.driver import BOOTSTRAP, Driver
from cluster.simulator.network import HOME
from cluster.simulator.replica import Replica
from cluster.simulator.scenario import MACHINE_LOST_S, Fault, FaultKind
from cluster.simulator.surroundings import Surroundings
from cluster.spec.ids import ROUTER, ReplicaId
from cluster.spec.messages import Drain
from cluster.supervisor.orders import DrainOrder, Order, RestartOrder, ResumeOrder, ScaleOrder


class Faults:
    """Faults of one scenario over one driver's members."""

    def __init__(self, around: Surroundings, driver: Driver) -> None:
        self.num_open = len(around.scenario.faults)
        """Number of faults that have not passed yet."""
        self._around = around
        self._driver = driver
        for fault in around.scenario.faults:
            around.after(fault.at_s, partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        self._around.trace.add("fault:", fault.kind, fault.member, fault.other)
        self._around.happened[fault.kind] += 1
        match fault.kind:
            case FaultKind.KILL:
                self._kill(fault)
            case FaultKind.PAUSE:
                self._pause(fault)
            case FaultKind.PARTITION:
                self._part(self._machine(fault.member), self._machine(fault.other), fault.duration_s)
            case FaultKind.LOSE_MACHINE:
                self._lose_machine(fault)
            case FaultKind.DRAIN:
                self._driver.replicas[fault.member].leader.take(Drain())
                self._pass()
            case FaultKind.RESTART:
                self._order(RestartOrder(replicas=(ReplicaId(fault.member),), is_rolling=True))
            case FaultKind.SCALE:
                role, _, index = fault.member.partition("-")
                self._order(ScaleOrder(**{role: int(index) + 1}))
            case FaultKind.STAND_BY:
                self._driver.give(DrainOrder(replica=ReplicaId(fault.member)))
                resume = partial(self._order, ResumeOrder(replica=ReplicaId(fault.member)))
                self._around.after(fault.duration_s, resume)

    def _order(self, order: Order) -> None:
        self._driver.give(order)
        self._pass()

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
            driver.replicas[fault.member].lose_rank(fault.rank)
        self._pass()

    def _pause(self, fault: Fault) -> None:
        self._stand_still(self._driver.replicas[fault.member], fault.duration_s)
        self._around.after(fault.duration_s, self._pass)

    def _stand_still(self, replica: Replica, duration_s: float) -> None:
        for rank in (ranks := replica.ranks):
            rank.pause()

        def resume() -> None:
            for rank in ranks:
                rank.resume()

        self._around.after(duration_s, resume)

    def _lose_machine(self, fault: Fault) -> None:
        replica, random = self._driver.replicas[fault.member], self._around.random
        lost_s = random.uniform(1, MACHINE_LOST_S) + fault.duration_s
        self._part(replica.machine, HOME, lost_s)
        if random.random() < 0.5:
            self._stand_still(replica, random.uniform(0, lost_s))

    def _part(self, machine: str, other: str, duration_s: float) -> None:
        network = self._around.network
        network.cut(machine, other)

        def heal() -> None:
            network.heal(machine, other)
            self._pass()

        self._around.after(duration_s, heal)

    def _machine(self, member: str) -> str:
        return HOME if member == HOME else self._driver.replicas[member].machine

    def _pass(self) -> None:
        self.num_open -= 1
