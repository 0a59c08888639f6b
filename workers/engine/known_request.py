"""What every rank of a replica remembers of a request between steps."""

from dataclasses import dataclass, field

from cluster.spec.sampling import TokenLogprobs
from cluster.spec.step_messages import Admit
from workers.engine.page_table import PageTable
from workers.engine.sampling_state import SamplingState


@dataclass(slots=True)
class KnownRequest:
    """As step plans have told it."""

    admit: Admit
    table: PageTable = field(default_factory=PageTable)
    """Page p of a sharded pool is the page p // cp of CP rank p mod cp."""
    sampling: SamplingState | None = None
    """Where tokens are drawn, from the first draw on."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt so far, until the first draw."""

    @property
    def pages(self) -> list[int]:
        """A copy of the table, for those who send."""
        pages: list[int] = self.table.all.tolist()
        return pages
