"""How tokens are drawn where a request does not say: by the model's ``generation_config.json``, or as OpenAI does."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from router.api.requests import MinP, RepetitionPenalty, Temperature, TopK, TopP


class SamplingDefaults(BaseModel):
    """Those of OpenAI's API, where the model has none."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """What the file of a model says; what no request may say is passed over, and so is ``do_sample``, as by vLLM."""
    allowed: dict[str, Any] = {}
    for name in SamplingDefaults.model_fields.keys() & generation_config.keys():
        with suppress(ValidationError):
            allowed[name] = getattr(SamplingDefaults.model_validate({name: generation_config[name]}), name)
    return SamplingDefaults(**allowed)
