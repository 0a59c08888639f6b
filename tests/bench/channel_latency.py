"""What CURVE costs a message: there and back between two threads, alternately with a key and without one.

python -m tests.bench.channel_latency
"""

import statistics
import threading
import time
from contextlib import closing

from cluster.channel import Inbox, Outbox, draw_key
from cluster.spec.messages import Message
from cluster.spec.step_messages import Shutdown
from cluster.spec.worker_spec import ChannelKey

HOST = "127.0.0.1"
SIZES = (64, 4096, 1 << 20)
"""Bytes of a message: a token, a step plan, a long prompt."""
ROUNDS = 5
TRIPS = {64: 400, 4096: 400, 1 << 20: 40}


def main() -> None:
    """Print the median of all trips of each size, and the best round's."""
    key = draw_key()
    print(f"{'bytes':>8}  {'':7}  {'median µs':>9}  {'best round µs':>13}")
    for size in SIZES:
        took: dict[str, list[list[float]]] = {"plain": [], "curve": []}
        for _ in range(ROUNDS):
            took["plain"].append(round_trips(None, size))
            took["curve"].append(round_trips(key, size))
        for name, rounds in took.items():
            median = statistics.median(trip for trips in rounds for trip in trips)
            best = min(statistics.median(trips) for trips in rounds)
            print(f"{size:>8}  {name:7}  {median * 1e6:>9.0f}  {best * 1e6:>13.0f}")


def round_trips(key: ChannelKey | None, size: int) -> list[float]:
    """Seconds of each trip there and back, after the connections are made."""
    message = Shutdown(reason="x" * size)
    with closing(Inbox(HOST, key)) as here, closing(Inbox(HOST, key)) as there:
        echo = threading.Thread(target=send_back, args=(there, here.address, key, TRIPS[size] + 1))
        echo.start()
        with closing(Outbox(key)) as outbox:
            trips = [trip(outbox, there.address, message, here) for _ in range(TRIPS[size] + 1)]
        echo.join()
    return trips[1:]


def trip(outbox: Outbox, address: str, message: Message, here: Inbox) -> float:
    """Seconds of one."""
    start_s = time.perf_counter()
    outbox.send(address, message)
    while not here.receive(10.0):
        continue
    return time.perf_counter() - start_s


def send_back(there: Inbox, address: str, key: ChannelKey | None, count: int) -> None:
    """Answer so many messages with themselves."""
    with closing(Outbox(key)) as outbox:
        while count:
            for message in there.receive(10.0):
                outbox.send(address, message)
                count -= 1


if __name__ == "__main__":
    main()
