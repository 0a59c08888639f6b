"""Remote side of a transfer in a separate process, which owns a region and answers queries on stdin."""

import hashlib
import sys

import msgspec
import numpy as np

from cluster.spec.config import TransferBackendName
from transfer.backends.registry import make_backend


def main() -> None:
    backend = make_backend(TransferBackendName(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1")
    region = backend.allocate(int(sys.argv[2]))
    print(msgspec.json.encode(region.endpoint).decode(), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "digest":
                print(hashlib.sha256(region.buffer).hexdigest(), flush=True)
            case "bytes":
                counts = np.bincount(np.frombuffer(region.buffer, dtype=np.uint8))
                print(
                    msgspec.json.encode({int(it): int(counts[it]) for it in counts.nonzero()[0]}).decode(), flush=True
                )
            case "close":
                backend.close()
                print("closed", flush=True)
    backend.close()


if __name__ == "__main__":
    main()
