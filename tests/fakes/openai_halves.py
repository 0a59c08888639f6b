"""The synchronous and the asynchronous half of OpenAI's client, called in one way."""

import inspect
from typing import Any


async def done(result: Any) -> Any:
    """The result of either half."""
    return await result if inspect.isawaitable(result) else result


async def all_of(stream: Any) -> list[Any]:
    """Everything that a stream of either half brings."""
    stream = await done(stream)
    return [item async for item in stream] if hasattr(stream, "__aiter__") else list(stream)


async def final_of(manager: Any, method: str) -> Any:
    """What the client's own accumulator has made of a stream at its end."""
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            return await getattr(stream, method)()
    with manager as stream:
        return getattr(stream, method)()
