"""Form of an answer, apart from the other values because some clients come without pydantic."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Door(BaseModel):
    """Door to open."""

    # Without it, the form allows any further property, and the demo model invents some.
    model_config = ConfigDict(extra="forbid")

    code: Literal["tango", "zulu"]
    floor: int = Field(ge=0, le=99)
