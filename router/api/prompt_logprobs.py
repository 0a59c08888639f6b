"""What answers tell of their prompts: the text before an answer, and how likely the model found it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec.sampling import TokenLogprobs
from cluster.tokenizer import Tokenizer
from router.api.logprobs import by_text, finite
from router.api.responses import CompletionLogprobs, PromptLogprob, PromptLogprobs
from router.text import AnswerText, TextRules, join
from router.token_text import token_text


@dataclass(slots=True)
class ShownPrompt:
    """One prompt, as all its choices show it."""

    token_ids: Sequence[int]
    echo: str | None = None
    """The text before each answer; None where it is not echoed."""
    skip_special_tokens: bool = True
    logprobs: Sequence[TokenLogprobs] = ()
    """Of every token but the first, where they were asked for, once they are there."""


def echo_logprobs(tokenizer: Tokenizer, prompt: ShownPrompt) -> CompletionLogprobs:
    """As OpenAI's API has those of an answer; nothing is told of the first token."""
    text = AnswerText(tokenizer, TextRules(skip_special_tokens=prompt.skip_special_tokens))
    tokens = [token_text(tokenizer, token_id) for token_id in prompt.token_ids]
    told = zip(tokens[1:], prompt.logprobs, strict=True)
    return CompletionLogprobs(
        text_offset=join(text.push(prompt.token_ids, None)).offsets,
        token_logprobs=[None, *(finite(logprobs.logprob) for logprobs in prompt.logprobs)],
        tokens=tokens,
        top_logprobs=[None, *(by_text(tokenizer, token, logprobs) for token, logprobs in told)],
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs | None) -> CompletionLogprobs:
    """Those of a prompt and its answer, as far as there is one."""
    if second is None:
        return first
    return CompletionLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(tokenizer: Tokenizer, prompt: ShownPrompt, num_top: int) -> PromptLogprobs:
    """As vLLM has them, the prompt's own token first."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=token_text(tokenizer, token_id))

    made: PromptLogprobs = [None]
    for token_id, told in zip(prompt.token_ids[1:], prompt.logprobs, strict=True):
        here = {token_id: entry(token_id, told.logprob, told.rank)}
        top = zip(told.top_ids[:num_top], told.top_logprobs[:num_top], strict=True)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            here.setdefault(top_id, entry(top_id, logprob, rank))
        made.append(here)
    return made
