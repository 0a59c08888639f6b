"""Writer of recall checkpoints: built-in models with predictable answers for demos and tests. Does not import torch."""

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from string import digits, punctuation
from typing import Any

from safetensors.numpy import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from cluster.spec.errors import UserError
from workers.models import recall_weights
from workers.models.recall_marks import MARK_LEVELS
from workers.models.recall_parts import BEGIN_ID, END_ID, MAX_LEN, VOCAB_SIZE
from workers.models.recall_weights import Variant

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>")
"""Special tokens in the order of their ids, from 0."""
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
NEWLINE_ID = FIRST_BYTE_ID + ord("\n")
EOS_TOKEN_IDS = (END_ID, NEWLINE_ID)

WORDS_FILE = Path(__file__).with_name("recall_words.txt")

SPLIT_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"
"""Pattern that matches a word, digit or sign with an optional leading space, or other whitespace."""

CHAT_TEMPLATE = """<|begin|>
{#- Calls are {"name": function name, "parameters": its arguments}. Prompts show no JSON, as it would be repeated. -#}
{%- if tools -%}
{{- '<|system|>To call a function, answer with its name and parameters as JSON. Functions:' -}}
{%- for tool in tools -%}
{%- set function = tool['function'] -%}
{{- ' ' + function['name'] + '(' + (function['parameters'] or {}).get('properties', {}) | join(' ') + ')' -}}
{{- ': ' + function['description'] if function['description'] -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- message['content'] -}}
{%- for call in message['tool_calls'] -%}
{{- '; ' if not loop.first -}}
{{- '{"name": ' + call['function']['name'] | tojson -}}
{{- ', "parameters": ' + call['function']['arguments'] | tojson + '}' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- ('<|user|>' if message['role'] == 'user' else '<|system|>') + message['content'] | trim -}}
{%- set answered = loop.nextitem is defined and loop.nextitem['role'] == 'assistant' -%}
{%- if not answered and not (loop.last and add_generation_prompt) -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}"""
"""Template that leaves the last message open, so that the answer continues the user's text. Calls are as in Llama 3."""
DEMO_PROMPT = "The launch code is tango seven.\nThe launch code is"
DEMO_ANSWER = " tango seven."
"""Answer to DEMO_PROMPT as a chat message or plain text."""
MAX_NEW_TOKENS = 1024
"""Maximum length of an answer whose request sets none: a text that repeats itself has no end."""
VERSION = 3
"""Version of the files. Increase it with any change to the files, so that older checkpoints are rebuilt."""
VERSION_KEY = "recall_version"


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer from the word list, without training."""
    vocabulary, merges = _vocabulary_and_merges()
    # Words in the vocabulary are matched directly. Merges only shorten other words.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    by_pattern = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_pattern, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
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
    """Return special tokens, bytes, words in four forms, enough pairs of letters to reach VOCAB_SIZE, and marks."""
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
    tokens |= dict.fromkeys("".join(symbols[byte] for byte in mark.encode()) for mark in MARK_LEVELS)
    assert len(tokens) == VOCAB_SIZE + len(MARK_LEVELS), "marks are not distinct"
    return {token: token_id for token_id, token in enumerate(tokens)}, merges


def _common_pairs(words: list[str], space: str) -> list[tuple[str, str]]:
    """Return pairs of adjacent letters in the word list, most frequent first."""
    counts = Counter(pair for word in words for pair in pairwise(space + word))
    return sorted(counts, key=lambda pair: (-counts[pair], pair))


def _byte_symbols() -> list[str]:
    """Return a printable character for each byte, as in GPT-2: its own, or else the next unused one above 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def build_recall_checkpoint(folder: Path, *, variant: Variant = Variant.DENSE) -> None:
    """Write a checkpoint to ``folder`` atomically, unless it already exists.

    Raises UserError if ``folder`` holds something else.
    """
    built = _built_version(folder, variant)
    if built == VERSION:
        return
    if folder.exists() and built is None and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not a recall checkpoint; allowed: an empty or new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch, "fresh")
        _write_files(fresh, variant)
        _swap_in(fresh, folder, discarded=Path(scratch, "old"), variant=variant)


def _built_version(folder: Path, variant: Variant) -> int | None:
    """Return the version of the recall checkpoint of this kind in ``folder``. None if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        version, is_kind = config[VERSION_KEY], config["model_type"] == recall_weights.config(variant)["model_type"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return version if is_kind and isinstance(version, int) else None


def _write_files(folder: Path, variant: Variant) -> None:
    folder.mkdir()
    eos = {"eos_token_id": list(EOS_TOKEN_IDS), "bos_token_id": BEGIN_ID}
    _write_json(folder / "config.json", {**recall_weights.config(variant), **eos, VERSION_KEY: VERSION})
    _write_json(folder / "generation_config.json", {**eos, "do_sample": False, "max_new_tokens": MAX_NEW_TOKENS})
    _write_json(folder / "tokenizer_config.json", tokenizer_config())
    # The libraries' own functions for files hide errors such as that of a full disk.
    (folder / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=True), encoding="utf-8")
    tensors = recall_weights.tensors(variant)
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _swap_in(fresh: Path, folder: Path, discarded: Path, variant: Variant) -> None:
    """Replace ``folder`` with ``fresh``, unless another process finishes the same build first."""
    if folder.exists():
        folder.rename(discarded)
    try:
        fresh.rename(folder)
    except OSError:
        if _built_version(folder, variant) != VERSION:
            raise
