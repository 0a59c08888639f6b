"""Metrics of a router's state, read when Prometheus asks: requests, breakers, and reports of replicas."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.channel import AsyncInbox
from cluster.spec.clock import Clock
from cluster.spec.lifecycle import Role
from router.admission import Gate
from router.directory import BreakerState, Directory
from router.dispatch import RequestTable
from router.page_index import PageIndex
from router.replica_metrics import replica_metrics
from router.request import ENDS


@dataclass(frozen=True, eq=False)
class StateMetrics(Collector):
    """Reads the parts of a router that count for themselves."""

    requests: RequestTable
    directory: Directory
    gate: Gate
    pages: PageIndex
    clock: Clock
    inbox: AsyncInbox

    def collect(self) -> Iterator[Metric]:
        requests, dropped = self.requests, self.requests.dropped + self.inbox.dropped
        ended = {end.value: requests.ended[end] for end in ENDS}
        yield GaugeMetricFamily("baton_num_requests_running", "Open requests.", value=requests.num_open)
        yield GaugeMetricFamily(
            "baton_num_requests_waiting", "HTTP requests that wait for room.", value=self.gate.num_waiting
        )
        yield GaugeMetricFamily(
            "baton_router_known_pages", "Cached pages that replicas have reported.", value=self.pages.num_pages
        )
        yield CounterMetricFamily(
            "baton_request_retries", "Attempts that began a request anew after a failure.", value=requests.num_retries
        )
        yield CounterMetricFamily(
            "baton_request_continuations", "Attempts that continued a stream.", value=requests.num_continuations
        )
        yield CounterMetricFamily(
            "baton_router_page_gaps", "Times that a replica's page reports were missing.", value=self.pages.num_gaps
        )
        yield _labelled("request_ended", "Requests by outcome.", "outcome", ended)
        yield _labelled("message_dropped", "Unused messages, by reason.", "why", dropped)
        yield from self._readiness()
        yield from replica_metrics(self.directory.snapshot)

    def _readiness(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("baton_ready_replicas", "Replicas that take requests.", labels=["role"])
        breakers = GaugeMetricFamily(
            "baton_breaker_state", "1 for the state of each replica's breaker.", labels=["replica", "state"]
        )
        for role in Role:
            ready.add_metric([role.value], len(self.directory.ready(role)))
            for peer in self.directory.peers(role):
                now = self.requests.breakers.state(peer, self.clock.now_s())
                for state in BreakerState:
                    breakers.add_metric([peer.replica, state.value], float(state is now))
        yield from (ready, breakers)


def _labelled(name: str, help_text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"baton_{name}", help_text, labels=[label])
    for labelled, value in sorted(values.items()):
        family.add_metric([labelled], value)
    return family
