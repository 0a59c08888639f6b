"""Base class and common value types of the deploy file's nodes."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cluster.spec.clock import MOST_S

ChunkTokens = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
"""Number of tokens in a step. No prompt has more than the maximum, and larger steps would fit in no memory."""
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MOST_S, strict=True)]
"""Seconds above 0, up to a limit that clocks and sockets can represent."""
MemoryGib = Annotated[float, Field(gt=0, le=65536, strict=True)]
Text = Annotated[str, Field(min_length=1)]
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+)$")]
"""Web origin as browsers send it: no path and no capitals."""


class Node(BaseModel):
    """Frozen node of the deploy file that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
