"""What an administrator may send: which replica is meant."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from router.api.requests import Body, SaltedBody

_STRICT = ConfigDict(extra="forbid")
"""A misspelt name would mean all replicas."""


class TargetRequest(Body):
    """``POST /admin/...``: one replica, or without a name what the route says."""

    model_config = _STRICT
    replica: str | None = None


class PinRequest(TargetRequest, SaltedBody):
    """``POST /admin/pin``: a prompt as text or token ids; of one replica, or without a name of all."""

    model_config = _STRICT
    expected: ClassVar[Mapping[str, str]] = {"prompt": "a string, or a list of token ids; neither may be empty"}
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
