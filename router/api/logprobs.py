"""Log-probabilities as the two APIs write them."""

from cluster.spec.sampling import TokenLogprobs
from cluster.tokenizer import Tokenizer
from router.api.responses import ChatLogprobs, ChosenLogprob, CompletionLogprobs, TokenLogprob
from router.text import Piece
from router.token_text import token_bytes, token_text

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


def completion_logprobs(tokenizer: Tokenizer, piece: Piece, num_chars: int = 0) -> CompletionLogprobs | None:
    """None where none were asked for. ``num_chars`` of text come before the piece's answer."""
    if not piece.logprobs:
        return None
    tokens = [token_text(tokenizer, token_id) for token_id in piece.token_ids]
    return CompletionLogprobs(
        text_offset=tuple(num_chars + offset for offset in piece.offsets),
        token_logprobs=[finite(told.logprob) for told in piece.logprobs],
        tokens=tokens,
        top_logprobs=[by_text(tokenizer, token, told) for token, told in zip(tokens, piece.logprobs, strict=True)],
    )


def chat_logprobs(tokenizer: Tokenizer, piece: Piece) -> ChatLogprobs | None:
    """None where none were asked for."""
    if not piece.logprobs:
        return None

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        raw = list(token_bytes(tokenizer, token_id))
        return TokenLogprob(token=token_text(tokenizer, token_id), logprob=finite(logprob), bytes=raw)

    content = []
    for token_id, told in zip(piece.token_ids, piece.logprobs, strict=True):
        chosen = entry(token_id, told.logprob)
        content.append(
            ChosenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[entry(*top) for top in zip(told.top_ids, told.top_logprobs, strict=True)],
            )
        )
    return ChatLogprobs(content=content)


def by_text(tokenizer: Tokenizer, chosen: str, told: TokenLogprobs) -> dict[str, float]:
    """Best first; of several tokens with one text the likeliest counts. The chosen one is there in any case."""
    logprobs: dict[str, float] = {}
    for token_id, logprob in zip(told.top_ids, told.top_logprobs, strict=True):
        logprobs.setdefault(token_text(tokenizer, token_id), finite(logprob))
    logprobs.setdefault(chosen, finite(told.logprob))
    return logprobs


def finite(logprob: float) -> float:
    """A number that JSON can write."""
    return max(logprob, _LEAST)
