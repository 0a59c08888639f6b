"""docs/metrics.md names what `/metrics` has, with its type, and nothing else."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import cast

from cluster.channel import AsyncInbox
from cluster.spec.clock import SystemClock
from router.admission import Gate
from router.directory import Directory
from router.metrics import Metrics
from router.page_index import PageIndex
from router.state_metrics import StateMetrics
from tests import readme
from tests.fakes import dispatching

PAGE = (readme.ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def exposed() -> dict[str, str]:
    """Every family of a router that has seen nothing yet, by its name without the prefix, and its type."""
    metrics = Metrics()
    inbox = cast("AsyncInbox", SimpleNamespace(dropped=Counter()))
    parts = (dispatching.make(), Directory(grace_s=1.0), Gate(1, 1.0), PageIndex(1), SystemClock(), inbox)
    metrics.registry.register(StateMetrics(*parts))
    return {
        family.name.removeprefix("baton_") + ("_total" if family.type == "counter" else ""): family.type
        for family in metrics.registry.collect()
    }


def test_the_page_has_every_family_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a family has two rows"
    assert dict(rows) == exposed()


def test_what_the_text_mentions_is_there() -> None:
    mentioned = set(re.findall(r"`(\w+_(?:total|seconds|perc|pages|running|waiting|bytes))`", PAGE))
    assert mentioned <= {*exposed(), "iteration_tokens_total"}
