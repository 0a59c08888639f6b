"""The parts of a router that its HTTP routes use."""

from dataclasses import dataclass, field

from cluster.spec.config import DeployConfig
from cluster.spec.worker_spec import RouterShare
from router.admission import Gate
from router.api_keys import KeyLimits, KeyRing
from router.directory import Directory
from router.dispatch import RequestTable
from router.metrics import Metrics
from router.overview import Overview
from router.parity_probe import ParityProbe
from router.preprocess.model import ServedModel
from router.preprocess.pool import PreprocessPool
from router.records import Tracing
from router.relay import Relay


@dataclass(frozen=True, kw_only=True)
class Service:
    config: DeployConfig
    model: ServedModel
    preprocess: PreprocessPool
    relay: Relay
    requests: RequestTable
    directory: Directory
    metrics: Metrics
    gate: Gate
    limits: KeyLimits
    keys: KeyRing
    share: RouterShare
    started: float
    """Unix time at which the cluster started."""
    parity: ParityProbe | None = None
    """Parity probes; None if there are none."""
    tracing: Tracing | None = None
    """Recorder of spans; None if no collector is configured."""
    overview: Overview = field(default_factory=Overview)

    @property
    def max_tokens(self) -> int:
        """Maximum length of prompt and answer together, limited by the model and the replicas' KV pools."""
        limit, pool_tokens = self.model.max_context, self.directory.pool_tokens
        return limit if pool_tokens is None else min(limit, pool_tokens)

    @property
    def state(self) -> dict[str, object]:
        state: dict[str, object] = {
            "name": self.share.name,
            "open": self.requests.num_open,
            "waiting": self.gate.num_waiting,
            "draining": self.relay.is_paused,
        }
        num_mismatches = int(self.metrics.parity_probes.values.get(("mismatch",), 0))
        return state | ({"parity_mismatches": num_mismatches} if num_mismatches else {})
