"""Tokenizer of a model folder, from ``tokenizer.json`` or from a vocabulary of tiktoken such as Kimi-K2's."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from cluster.model_folder import assigned_text, is_lfs_pointer, read_json
from cluster.spec.errors import UserError


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Load a folder's tokenizer.

    Raises:
        UserError: there is none, or its files cannot be read.
    """
    path = folder / "tokenizer.json"
    has_json = path.is_file()
    if not has_json and not (path := folder / "tiktoken.model").is_file():
        raise UserError(f"model folder {folder} has no tokenizer.json; Baton needs a fast tokenizer")
    try:
        if is_lfs_pointer(path):
            raise UserError(f"{path} is a pointer of Git LFS, not the tokenizer; `git lfs pull` fetches it")
        if has_json:
            return tokenizers.Tokenizer.from_file(str(path))
        return _from_ranks(_read_ranks(path), _split_pattern(folder), read_json(folder / "tokenizer_config.json"))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} is not a tokenizer: {error}") from error


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of every token, which is its id, in order. A line of the file has a token in base64, and its
    rank.
    """
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _split_pattern(folder: Path) -> str:
    """Return the expression that splits a text into words, from the folder's Python code."""
    for path in sorted(folder.glob("tokenization_*.py")):
        if (pattern := assigned_text(path, "pat_str")) is not None:
            return pattern
    raise UserError(f"{folder} has tiktoken.model, but no tokenization_*.py that assigns pat_str, which splits texts")


def _from_ranks(ranks: Mapping[bytes, int], pattern: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer, which joins the two parts whose union has the lowest rank until no union has a rank."""
    spelled, added = {token: _spell(token) for token in ranks}, _added_tokens(len(ranks), config)
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    vocab |= {token.content: token_id for token_id, token in added.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, _pairs(spelled), ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added.values()))
    return tokenizer


def _pairs(spelled: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that can be joined, in the order of the tokens that they make."""
    cuts = ((token[:cut], token[cut:]) for token in spelled for cut in range(1, len(token)))
    return [(spelled[left], spelled[right]) for left, right in cuts if left in spelled and right in spelled]


def _added_tokens(first: int, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens from id ``first`` on that texts contain as they are, by id.

    Ids without a token are reserved, as in Kimi-K2: ids must have no gaps where a grammar adds tokens.
    """
    given = {int(token_id): token for token_id, token in config.get("added_tokens_decoder", {}).items()}
    ids = range(first, max(given, default=0))
    reserved = {token_id: {"content": f"<|reserved_token_{token_id}|>", "special": True} for token_id in ids}
    return {
        token_id: AddedToken(token["content"], special=token.get("special", False), normalized=False)
        for token_id, token in sorted((reserved | given).items())
    }


def _byte_chars() -> dict[int, str]:
    """Return the character that stands for each byte in a vocabulary of bytes, as in GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(others)}


_CHARS = _byte_chars()


def _spell(token: bytes) -> str:
    return token.decode("latin-1").translate(_CHARS)
