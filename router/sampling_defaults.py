"""Sampling parameters: their legal values, and the defaults of a model's ``generation_config.json`` or OpenAI's API."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=0, le=1)]
"""0 keeps only the likeliest token."""
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]


class SamplingDefaults(BaseModel):
    """Values for the parameters that a request leaves out; by default OpenAI's."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Read a model's file; like vLLM, ignore illegal values and ``do_sample``."""
    allowed: dict[str, Any] = {}
    for name in SamplingDefaults.model_fields.keys() & generation_config.keys():
        with suppress(ValidationError):
            allowed[name] = getattr(SamplingDefaults.model_validate({name: generation_config[name]}), name)
    return SamplingDefaults(**allowed)
