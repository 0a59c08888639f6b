"""Thread that compares received pages with their senders' digests, while the main thread computes."""

import queue
import threading
from collections.abc import Callable

from cluster.channel import Post, send_or_log
from cluster.spec.registry import RankRecord
from cluster.spec.transfer_messages import CheckPages, PagesChecked
from transfer.page_range import wrong_pages


class PageChecker:
    """Thread that answers the leader's CheckPages in order. A request's pages must not change before the answer."""

    def __init__(
        self,
        record: RankRecord,
        region: memoryview,
        leader_address: str,
        outbox: Post,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Take ownership of the outbox, and start the thread. ``on_failure`` gets the error that ends the thread."""
        self._record = record
        self._region = region
        self._leader_address = leader_address
        self._outbox = outbox
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[CheckPages | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="page-checker", daemon=True)
        self._thread.start()

    def check(self, message: CheckPages) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """Answer queued messages, and wait for the thread."""
        self._queue.put(None)
        self._thread.join()
        self._outbox.close()

    def _run(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                wrong = wrong_pages(self._region, self._record.layout, message.digests)
                answer = PagesChecked(room=message.room, rank=self._record.global_rank, wrong=wrong)
                send_or_log(self._outbox, self._leader_address, answer)
        except Exception as error:  # a rank that cannot check pages must end
            self._on_failure(error)
