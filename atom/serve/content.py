"""Texts that stand in place of contents that a model cannot read."""

IMAGE = "[image: not shown to this model]"  # in a tool's result, which stays in the history
