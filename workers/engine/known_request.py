"""State of a request that every rank of a replica keeps between steps."""

from dataclasses import dataclass, field

from cluster.spec.sampling import TokenLogprobs
from cluster.spec.step_messages import Admit
from workers.engine.page_table import PageTable
from workers.engine.sampling_state import SamplingState


@dataclass(slots=True)
class KnownRequest:
    """State of a request as announced by step plans."""

    admit: Admit
    tables: list[PageTable]
    """Page tables by lifetime; page p of a sharded pool is page p // cp of CP rank p mod cp."""
    sampling: SamplingState | None = None
    """Sampling state on the sampling rank, from the first sample on."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt so far, until the first sample."""

    @property
    def pages(self) -> list[list[int]]:
        """Return a copy of the tables, for senders."""
        return [table.all.tolist() for table in self.tables]
