"""Which token each of a rank's experts sees, in the order of their seats."""

from torch import Tensor


def seat_order(experts: Tensor, first: int, num_seats: int) -> tuple[Tensor, list[int]]:
    """Of ``experts [tokens, k]``, those from ``first`` on: their places, flattened, by seat, and how many each has.

    Equal ones stay in the order of their tokens. On a GPU the host waits for the counts.
    """
    seats = experts.flatten().long() - first
    seats[(seats < 0) | (seats >= num_seats)] = num_seats
    counts = seats.bincount(minlength=num_seats + 1).tolist()[:num_seats]
    return seats.argsort(stable=True)[: sum(counts)], counts
