"""Properties of the served model on which requests depend."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.grammar import Grammars
from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.tokenizer import Tokenizer
from router.message import has_reasoning
from router.tool_calls.dialects import Dialect, find_dialect

_log = logging.getLogger(__name__)

Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=0, le=1)]
"""Value of top_p; 0 keeps only the most likely token."""
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]

MIN_BODY_BYTES = 4 << 20
"""Size of a body that is accepted whatever the context length."""
_MAX_TOKEN_CHARS = 16
"""Average number of characters per token that no natural text exceeds."""


class SamplingDefaults(BaseModel):
    """Defaults of request parameters: the model's, or else OpenAI's."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum length of an answer; None means as many tokens as fit."""


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in a model's generation_config.json; like vLLM, ignore invalid values and ``do_sample``."""
    allowed: dict[str, Any] = {}
    for name in SamplingDefaults.model_fields.keys() & generation_config.keys():
        try:
            allowed[name] = getattr(SamplingDefaults.model_validate({name: generation_config[name]}), name)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            _log.warning("generation_config.json: %s: ignored %r: %s", name, generation_config[name], reason)
    return SamplingDefaults(**allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    max_context: int
    """Maximum number of tokens in prompt and answer together."""
    page_size: int
    dialect: Dialect | None
    """Format of the model's tool calls; None if it has none."""
    sampling_defaults: SamplingDefaults
    has_reasoning: bool
    grammars: Grammars | None = None
    """Compiler of grammars; None in a process that must not compile any."""

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a body: a text that fits the context, and room for tools, schemas and further prompts."""
        return MIN_BODY_BYTES + self.max_text_chars

    @property
    def max_text_chars(self) -> int:
        """Maximum length of a text that is tokenized. No natural text that fits the context is as long."""
        return self.max_context * _MAX_TOKEN_CHARS


def read_model(config: DeployConfig, folder: Path) -> ServedModel:
    """Read a model's tokenizer and limits.

    Raises:
        UserError: the model folder cannot be used.
    """
    tokenizer = Tokenizer(folder)
    max_context = config.model.max_context or tokenizer.max_context
    if max_context is None:
        raise UserError("model.max_context: not set, and the model's config.json has no max_position_embeddings")
    generation: Mapping[str, Any] = tokenizer.generation_config if config.model.sampling_defaults == "model" else {}
    return ServedModel(
        name=config.model.name,
        tokenizer=tokenizer,
        max_context=max_context,
        page_size=config.kv.page_size,
        dialect=find_dialect(config.router.tool_parser, tokenizer.tool_template),
        sampling_defaults=defaults_of(generation),
        has_reasoning=has_reasoning(config.router.reasoning_parser, tokenizer.chat_template),
    )
