"""Variables of a chat template that requests set: its own, and the effort.

check_variables(tokenizer, body.chat_template_kwargs)
effort_variables(tokenizer, "xhigh")        # {"reasoning_effort": "high"} if the template lists low, medium, high
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from atom.checkpoint import Tokenizer
from atom.checkpoint.chat_template import EFFORTS
from atom.serve.context import OWN_VARIABLES
from atom.serve.http.errors import FieldError, shown

SWITCHES = ("enable_thinking", "thinking")  # what templates call whether the model thinks
COMMON = {*SWITCHES, "reasoning_effort", "date_string", "builtin_tools", "tools_in_user_message"}  # sent to all models
LEVELS = ("low", "medium", "high")  # of models whose templates list none


def check_variables(tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None) -> None:
    """FieldError for a variable that the template does not read, or that each request has."""
    read = {name for name in tokenizer.template_variables() - OWN_VARIABLES if not name.endswith("_token")}
    for name in kwargs or ():
        if name not in read | COMMON:
            known = ", ".join(sorted(read)) or "none"
            fault = f"chat_template_kwargs.{shown(name)} is not taken; this model's chat template reads: {known}"
            raise FieldError("chat_template_kwargs", fault)


def effort_variables(tokenizer: Tokenizer, effort: str | None) -> dict[str, Any]:
    """The template's variables for an effort: its nearest level, or its switch for none; empty if it has neither."""
    if effort is None:
        return {}
    variables, levels = tokenizer.template_variables(), tokenizer.effort_levels()
    switches = {name: False for name in SWITCHES if name in variables}
    if effort == "none" and "none" not in levels and switches:
        return switches
    if "reasoning_effort" not in variables:
        return {}
    return {"reasoning_effort": nearest(effort, levels if len(levels) > 1 else {*LEVELS, *levels})}


def nearest(effort: str, levels: Collection[str]) -> str:
    """The level next to an effort; the higher one of two."""
    place = EFFORTS.index(effort)
    return min(levels, key=lambda level: (abs(EFFORTS.index(level) - place), -EFFORTS.index(level)))
