"""A worker whose pool is apart from the memory that peers reach, as a GPU's is, on the CPU."""

from unittest.mock import patch

from tests.fakes.eager_worker import EagerWorker
from workers import rank
from workers.memory.peer_memory import open_apart


class WorkerWithStagedPool(EagerWorker):
    """Its module, which only its process imports, puts the pool in place."""


patch.object(rank, "open_peer_memory", open_apart).start()
