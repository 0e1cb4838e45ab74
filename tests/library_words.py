"""What libraries say of faults, in the words of the release that is installed: our messages end with them.

of_pydantic(str, 1)        # Input should be a valid string
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Needed(BaseModel):
    field: int


def of_pydantic(type: Any, value: Any) -> str:
    """Why a value is none of a type."""
    try:
        TypeAdapter(type).validate_python(value)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    raise AssertionError(f"{value!r} is a {type}")


UNKNOWN_FIELD = of_pydantic(Closed, {"x": 1})
MISSING_FIELD = of_pydantic(Needed, {})
