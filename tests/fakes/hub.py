"""A Hugging Face cache with one small random checkpoint, a byte tokenizer and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.checkpoints import make_checkpoint

COMMIT = "0" * 40
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def write_hub_cache(home: Path, name: str, family: str = "qwen3") -> Path:
    """Write a checkpoint as if ``name`` had been downloaded with ``HF_HOME=home``. Return its folder."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    make_checkpoint(folder, family)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_tokenizer() -> Tokenizer:
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
