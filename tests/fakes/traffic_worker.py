"""Worker that counts the bytes received in each layer."""

from collections import Counter
from typing import Any
from unittest.mock import patch

from tests.fakes.load_reporting_worker import LoadReportingWorker
from workers.models.decoder import DecoderLayer

_forward = DecoderLayer.forward


class TrafficWorker(LoadReportingWorker):
    """Worker that returns, between runs, what its layers have received."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_layer: list[dict[str, int]] = []

        def forward(layer: DecoderLayer, *inputs: Any) -> None:
            before = self._received()
            _forward(layer, *inputs)
            self._by_layer.append(dict(self._received() - before))

        patch.object(DecoderLayer, "forward", forward).start()

    def layer_bytes(self) -> list[dict[str, int]]:
        """Return the bytes received since the last call, by layer in order of computation, and by group."""
        by_layer, self._by_layer = self._by_layer, []
        return by_layer

    def _received(self) -> Counter[str]:
        """Return the bytes received so far by group. None during warm-up, before the rank is complete."""
        if self._rank is None:
            return Counter()
        return Counter({group.name.partition("/")[0]: group.received_bytes for group in self._rank.groups.all})
