"""Log-probabilities as OpenAI's two APIs and vLLM write them, of answers and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec.sampling import TokenLogprobs
from cluster.tokenizer import Tokenizer
from router.api.responses import (
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from router.text import AnswerText, OutputChunk, TextRules, join, token_bytes, token_text

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(slots=True)
class ShownPrompt:
    """Parts of a prompt that its responses show."""

    token_ids: Sequence[int]
    echo: str | None = None
    skip_special_tokens: bool = True
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry for every token but the first, where requested, once they are there."""


def completion_logprobs(tokenizer: Tokenizer, chunk: OutputChunk, num_chars: int = 0) -> CompletionLogprobs | None:
    """Return ``/v1/completions`` log-probabilities of text after ``num_chars`` characters; None if not requested."""
    if not chunk.logprobs:
        return None
    tokens = [token_text(tokenizer, token_id) for token_id in chunk.token_ids]
    return CompletionLogprobs(
        text_offset=tuple(num_chars + offset for offset in chunk.offsets),
        token_logprobs=[finite(given.logprob) for given in chunk.logprobs],
        tokens=tokens,
        top_logprobs=[_by_text(tokenizer, token, given) for token, given in zip(tokens, chunk.logprobs, strict=True)],
    )


def chat_logprobs(tokenizer: Tokenizer, chunk: OutputChunk) -> ChatLogprobs:

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        raw = list(token_bytes(tokenizer, token_id))
        return TokenLogprob(token=token_text(tokenizer, token_id), logprob=finite(logprob), bytes=raw)

    content = []
    for token_id, given in zip(chunk.token_ids, chunk.logprobs, strict=True):
        chosen = entry(token_id, given.logprob)
        content.append(
            ChosenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[entry(*top) for top in zip(given.top_ids, given.top_logprobs, strict=True)],
            )
        )
    return ChatLogprobs(content=content)


def echo_logprobs(tokenizer: Tokenizer, prompt: ShownPrompt) -> CompletionLogprobs:
    """Return those of a prompt in the form of an answer's; the first token has none."""
    text = AnswerText(tokenizer, TextRules(skip_special_tokens=prompt.skip_special_tokens))
    tokens = [token_text(tokenizer, token_id) for token_id in prompt.token_ids]
    given = zip(tokens[1:], prompt.logprobs, strict=True)
    return CompletionLogprobs(
        text_offset=tuple(join(text.push(prompt.token_ids, None)).offsets),
        token_logprobs=[None, *(finite(logprobs.logprob) for logprobs in prompt.logprobs)],
        tokens=tokens,
        top_logprobs=[None, *(_by_text(tokenizer, token, logprobs) for token, logprobs in given)],
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs | None) -> CompletionLogprobs:
    """Join those of a prompt and its answer, if there is one."""
    if second is None:
        return first
    return CompletionLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(tokenizer: Tokenizer, prompt: ShownPrompt, num_top: int) -> PromptLogprobs:
    """Return those of a prompt in vLLM's form, the prompt's own token first."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=token_text(tokenizer, token_id))

    made: PromptLogprobs = [None]
    for token_id, given in zip(prompt.token_ids[1:], prompt.logprobs, strict=True):
        here = {token_id: entry(token_id, given.logprob, given.rank)}
        top = zip(given.top_ids[:num_top], given.top_logprobs[:num_top], strict=True)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            here.setdefault(top_id, entry(top_id, logprob, rank))
        made.append(here)
    return made


def finite(logprob: float) -> float:
    """Return a number that JSON can write."""
    return max(logprob, _LEAST)


def _by_text(tokenizer: Tokenizer, chosen: str, given: TokenLogprobs) -> dict[str, float]:
    """Best first and always with the chosen token; of several tokens with one text the likeliest counts."""
    logprobs: dict[str, float] = {}
    for token_id, logprob in zip(given.top_ids, given.top_logprobs, strict=True):
        logprobs.setdefault(token_text(tokenizer, token_id), finite(logprob))
    logprobs.setdefault(chosen, finite(given.logprob))
    return logprobs
