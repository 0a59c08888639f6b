"""Single tokens as text and as bytes, for log-probabilities."""

import re

from cluster.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "\u2581"
"""How SentencePiece writes the space before a word."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; U+FFFD for bytes that are no character by themselves."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    # Decoders drop the space before the first word of a text.
    is_word = tokenizer.token_of(token_id).startswith(_WORD_MARK)
    return f" {text}" if is_word and not text.startswith(" ") else text


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """A token's bytes: those of all tokens of a text, one after another, are the text's."""
    text = token_text(tokenizer, token_id)
    if "\ufffd" not in text:
        return text.encode()
    token = tokenizer.token_of(token_id)
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return text.encode()


def _byte_characters() -> dict[str, int]:
    """By the character that byte-level BPE writes for it, each byte: itself if printable, else the next from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
