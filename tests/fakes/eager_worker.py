"""A worker that reads stored pages for prompts of any length, since those of most tests are short."""

from unittest.mock import patch

from workers.worker import Worker


class EagerWorker(Worker):
    """Only its process imports this module, which changes the threshold."""


patch("workers.hicache.policy.prefetcher.MIN_TOKENS", 1).start()
