"""Batching of a leader's messages: tokens of a step for one router are joined, in the order of each address."""

from collections.abc import Iterable, Iterator

from cluster.spec.messages import Message, Output, Outputs


def outputs_together(outgoing: Iterable[tuple[str, Message]]) -> Iterator[tuple[str, Message]]:
    """Join outputs for one address into as few messages as keep the order of each address."""
    together: dict[str, list[Output]] = {}
    for address, message in outgoing:
        if isinstance(message, Output):
            together.setdefault(address, []).append(message)
            continue
        if outputs := together.pop(address, None):
            yield address, Outputs(outputs=outputs)
        yield address, message
    for address, outputs in together.items():
        yield address, Outputs(outputs=outputs)
