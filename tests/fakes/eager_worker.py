"""A worker that reads stored pages for prompts of any length, since those of most tests are short."""

from functools import partial
from unittest.mock import patch

from workers.hicache.tiers import Tiers
from workers.worker import Worker


class EagerWorker(Worker):
    """Its module, which only its process imports, puts the tiers in place."""


patch("workers.build.Tiers", partial(Tiers, min_prefetch_tokens=1)).start()
