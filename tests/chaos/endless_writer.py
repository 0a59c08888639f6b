"""Process that writes with Mooncake without a pause: a region full of ones, then one full of twos, and so on."""

import itertools
import sys

import msgspec

from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError
from cluster.spec.registry import Endpoint
from transfer.backends.registry import make_backend
from transfer.page_range import Span


def main() -> None:
    """Read an endpoint from stdin, report each completed write, and end with the first failure."""
    target = msgspec.json.decode(sys.stdin.readline(), type=Endpoint)
    backend = make_backend(TransferBackendName.MOONCAKE, sys.argv[1])
    regions = [backend.allocate(target.num_bytes) for _ in range(2)]
    for byte, region in enumerate(regions, start=1):
        region.buffer[:] = bytes([byte]) * target.num_bytes
    for number in itertools.count(1):
        try:
            backend.write(regions[number % 2], target, [Span(0, 0, target.num_bytes)])
        except TransferError:
            print("failed", flush=True)
            return
        print(number, flush=True)


if __name__ == "__main__":
    main()
