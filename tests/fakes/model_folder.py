"""Model folder without weights whose tokens are bytes: token i is byte i, followed by special tokens."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

BOS, EOS = 256, 257
VOCAB_SIZE = 258

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model_folder(folder: Path, *, max_context: int = 512, template: str | None = TEMPLATE) -> Path:
    """Write tokenizer and configuration. Completions begin with BOS."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {character: byte for byte, character in _byte_characters().items()} | {"<s>": BOS, "</s>": EOS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    if template is not None:
        tokenizer_config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "config.json", {"max_position_embeddings": max_context, "vocab_size": VOCAB_SIZE})
    write_json(folder / "generation_config.json", {"eos_token_id": [EOS]})
    return folder


def write_sentence_piece(folder: Path) -> Path:
    """Write a model folder whose vocabulary is like Llama 2's: words begin with U+2581, the space before them, and
    missing characters are written as bytes. Tokens 257 to 260 are a space, " the", "cat" and two spaces.
    """
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "cat", "\u2581\u2581"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: token_id for token_id, word in enumerate(words)}, [], byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    write_model_folder(folder)
    made.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", {"max_position_embeddings": 512, "vocab_size": len(words)})
    return folder


def write_json(path: Path, content: object) -> None:
    """Replace a file's content by JSON."""
    path.write_text(json.dumps(content), encoding="utf-8")


def _byte_characters() -> dict[int, str]:
    """Return the printable character with which byte-level tokenizers represent each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
