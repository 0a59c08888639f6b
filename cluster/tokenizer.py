"""Tokenizer and chat template of a model folder in Hugging Face format, without importing torch or transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from cluster.chat_template import compile_template, read_templates
from cluster.model_folder import read_json
from cluster.spec.context import model_context
from cluster.spec.errors import UserError
from cluster.tokenizer_file import load_tokenizer

_UNFINISHED = "\ufffd"
"""Character that decoders return for invalid or incomplete bytes."""

_MAX_HELD_TOKENS = 32
"""Number of tokens without a complete character after which their bytes count as invalid rather than incomplete."""

_MAX_CONTEXT_TOKENS = 16
"""Maximum number of context tokens: short contexts decode faster, long ones are rebuilt less often."""

_PROMPT_CONTEXT_TOKENS = 4
"""Number of a prompt's last tokens that serve as context: one with a text is enough, and they may be special."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokenizer and limits of one model; thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read a folder's tokenizer and the configuration files next to it.

        Raises:
            UserError: there is no tokenizer, or a file cannot be read.
        """
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(folder / "config.json")
        text_config = config | config.get("text_config", {})
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(read_json(folder / "special_tokens_map.json") | tokenizer_config)
        self.vocab_size: int = text_config.get("vocab_size") or self._tokenizer.get_vocab_size()
        """Size of the model's embedding table. The tokenizer may have fewer or more tokens."""
        self.max_context: int | None = model_context(text_config)
        """Maximum number of prompt and output tokens together, if the model declares it."""
        self.generation_config = read_json(folder / "generation_config.json")
        """Contents of the model's generation_config.json; empty if there is no such file."""
        self.eos_ids = self._eos_ids(text_config)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_texts = frozenset(token.content for token in added if token.special)
        in_brackets = {token.content for token in added if token.content[:1] == "<" and token.content[-1:] == ">"}
        self.whole_texts = self.special_texts | in_brackets
        """Texts of tokens that a grammar allows only by name. llguidance takes all added tokens in angle brackets as
        special, such as Qwen's markers, which are not."""
        self._drops_space = self._finds_dropped_space()
        templates = read_templates(folder, tokenizer_config, config.get("model_type"))
        self.chat_template = templates.get("default", next(iter(templates.values()), None))
        self.tool_template = templates.get("tool_use", self.chat_template)
        """Template of conversations with tools. Some models, such as Hermes, have a separate one."""
        self._template = compile_template(self.chat_template)
        is_same = self.tool_template == self.chat_template
        self._tool_template = self._template if is_same else compile_template(self.tool_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens spelled out in the text are recognized."""
        # A batch without offsets takes half the time and memory, and lets other threads run.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, skipping ids that have no token."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_of(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; empty for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation, to be encoded without adding special tokens.

        Raises:
            UserError: the model has no template, or the template rejects the conversation.
        """
        given: dict[str, Any] = {"tools": None, "documents": None} | self.special_tokens | dict(variables or {})
        template = self._tool_template if given["tools"] else self._template
        if template is None:
            raise UserError(
                "this model has no chat template; use /v1/completions, or add chat_template.jinja to its folder"
            )
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(given)
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the model's chat template rejects these messages: {error}") from error

    def context_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the prompt's tokens that a text after it must be decoded with; none for most tokenizers."""
        return [*prompt_ids[-_PROMPT_CONTEXT_TOKENS:]] if self._drops_space else []

    def _finds_dropped_space(self) -> bool:
        """Return whether the space before a word is dropped where a text starts, as by SentencePiece's decoders."""
        ids = self.encode("a a", add_special_tokens=False)
        return "".join(self.decode([token_id]) for token_id in ids) != self.decode(ids)

    def _eos_ids(self, config: Mapping[str, Any]) -> frozenset[int]:
        """Return the tokenizer's end-of-sequence token, and those of the generation configuration or else the model's.

        Fine-tuned models may end turns with the tokenizer's alone, as vLLM expects; transformers' ``generate`` takes it
        only if the others name none.
        """
        named = (self.generation_config.get("eos_token_id"), config.get("eos_token_id"))
        first: int | Sequence[int] = next((given for given in named if given is not None), ())
        token = self.special_tokens.get("eos_token")
        own = None if token is None else self._tokenizer.token_to_id(token)
        return frozenset([first] if isinstance(first, int) else first).union(() if own is None else [own])


class Detokenizer:
    """Incremental decoder of one answer, which returns only complete characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        """Start an answer; ``context`` has the tokens before it, whose text is not returned."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = tokenizer.context_of(context)
        """Latest tokens: context and returned ones, then those held back."""
        self._given = tokenizer.decode(self._window, skip_special_tokens) if self._window else ""
        """Text of the tokens in the window before those held back."""
        if self._given.endswith(_UNFINISHED):  # no answer completes this character
            self._window, self._given = [], ""
        self._num_given = len(self._window)
        """Number of tokens in the window before those held back."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes, empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._held_text()
        may_wait = len(self._window) - self._num_given < _MAX_HELD_TOKENS
        return "" if may_wait and (not text or text.endswith(_UNFINISHED)) else self._give(text)

    @property
    def held_text(self) -> str:
        """Text held back, possibly with an incomplete character."""
        return self._held_text() if len(self._window) > self._num_given else ""

    def flush(self) -> str:
        """Return and clear ``held_text``."""
        return self._give(self._held_text()) if len(self._window) > self._num_given else ""

    def _held_text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)[len(self._given) :]

    def _give(self, text: str) -> str:
        if not text:  # hidden tokens are no context
            del self._window[self._num_given :]
        elif len(self._window) > _MAX_CONTEXT_TOKENS:
            self._window = self._window[self._num_given :]
            self._given = self._tokenizer.decode(self._window, self._skip_special_tokens)
        else:
            self._given += text
        self._num_given = len(self._window)
        return text


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        match config.get(name):
            case str(token) | {"content": str(token)}:
                tokens[name] = token
            case other if other is not None:
                raise UserError(f"{name} in tokenizer_config.json is {other!r}; allowed: a text, or its content")
    return tokens
