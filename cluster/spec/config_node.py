"""What every node of the deploy YAML is, and the types that several of them have."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1_000_000, strict=True)]
"""Longer than anybody waits, and short of what clocks and sockets cannot count."""
MemoryGib = Annotated[float, Field(gt=0, le=65536, strict=True)]
Text = Annotated[str, Field(min_length=1)]
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+)$")]
"""Browsers name no path in it, nor capitals."""


class Node(BaseModel):
    """Frozen; an unknown key is refused with its path."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
