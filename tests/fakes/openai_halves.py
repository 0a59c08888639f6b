"""OpenAI's synchronous and asynchronous clients with one interface."""

import inspect
from typing import Any


async def done(result: Any) -> Any:
    """Return the result of either client."""
    return await result if inspect.isawaitable(result) else result


async def all_of(stream: Any) -> list[Any]:
    """Return everything that either client's stream yields."""
    stream = await done(stream)
    return [item async for item in stream] if hasattr(stream, "__aiter__") else list(stream)


async def final_of(manager: Any, method: str) -> Any:
    """Return the final result of the client's own stream accumulator."""
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            return await getattr(stream, method)()
    with manager as stream:
        return getattr(stream, method)()
