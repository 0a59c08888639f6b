"""Tokenizer of the recall model: byte-level, with common English words and digits as one token each."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from string import digits, punctuation
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from workers.models.recall_weights import BEGIN_ID, END_ID, MAX_LEN, VOCAB_SIZE

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>")
"""Special tokens in the order of their ids, from 0."""
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
FIRST_WORD_ID = FIRST_BYTE_ID + 256
"""First of the tokens that are whole pieces of text."""
NEWLINE_ID = FIRST_BYTE_ID + ord("\n")
EOS_TOKEN_IDS = (END_ID, NEWLINE_ID)

WORDS_FILE = Path(__file__).with_name("recall_words.txt")

SPLIT_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"
"""Pattern of a word, a digit or a sign, each with the space before it; any other white space by itself."""

CHAT_TEMPLATE = """<|begin|>
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- message['content'] + '<|end|>' -}}
{%- else -%}
{{- ('<|user|>' if message['role'] == 'user' else '<|system|>') + message['content'] | trim -}}
{%- set answered = loop.nextitem is defined and loop.nextitem['role'] == 'assistant' -%}
{%- if not answered and not (loop.last and add_generation_prompt) -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}"""
"""The last message stays open, so that the answer continues the user's words, as earlier answers did."""


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer from the word list; nothing is trained, so it is always the same."""
    vocabulary, merges = _vocabulary_and_merges()
    # Words in the vocabulary are matched whole; merges only shorten the others.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    by_pattern = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_pattern, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, as transformers reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN_ID],
        "eos_token": SPECIAL_TOKENS[END_ID],
        "pad_token": SPECIAL_TOKENS[END_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LEN,
        "chat_template": CHAT_TEMPLATE,
    }


def _vocabulary_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return special tokens, bytes, words in four forms, then pieces of words until VOCAB_SIZE is reached."""
    symbols = _byte_symbols()
    space = symbols[ord(" ")]
    words = WORDS_FILE.read_text(encoding="utf-8").split()
    forms = [form for word in words for form in (word, word.capitalize())] + list(digits + punctuation)
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *symbols, *(prefix + form for form in forms for prefix in ("", space))])
    merges = []
    for left, right in _common_pairs(words, space):
        if len(tokens) == VOCAB_SIZE:
            break
        merges.append((left, right))
        tokens[left + right] = None
    assert len(tokens) == VOCAB_SIZE, f"{len(tokens)} tokens: the word list is too short or too long"
    return {token: token_id for token_id, token in enumerate(tokens)}, merges


def _common_pairs(words: list[str], space: str) -> list[tuple[str, str]]:
    """Return pairs of adjacent letters in the word list, the most frequent first."""
    counts = Counter(pair for word in words for pair in pairwise(space + word))
    return sorted(counts, key=lambda pair: (-counts[pair], pair))


def _byte_symbols() -> list[str]:
    """Return a printable character for each byte: itself if it is one, else the next above 255 (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
