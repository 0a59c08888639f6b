"""Messages as OpenAI's API writes them, whole and part by part.

Thoughts come under both names that clients look for: ``reasoning_content``, SGLang's and DeepSeek's, and ``reasoning``,
to which vLLM has gone over.
"""

from msgspec import UNSET

from router.api.responses import Delta, FunctionCall, Message, ToolCall, ToolCallDelta
from router.message import CallPart, MessagePart


def message(whole: MessagePart) -> Message:
    """A whole message."""
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)) for call in whole.calls
    ]
    return Message(
        content=None if calls and not whole.content else whole.content,
        reasoning_content=whole.thoughts or UNSET,
        reasoning=whole.thoughts or UNSET,
        tool_calls=calls or UNSET,
    )


def delta(part: MessagePart) -> Delta:
    """The next part of a message."""
    return Delta(
        content=part.content or UNSET,
        reasoning_content=part.thoughts or UNSET,
        reasoning=part.thoughts or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] or UNSET,
    )


def _call_delta(call: CallPart) -> ToolCallDelta:
    if not call.id:
        return ToolCallDelta(index=call.index, function=FunctionCall(arguments=call.arguments))
    named = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=named)
