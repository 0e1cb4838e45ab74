"""Find the markers around a model's reasoning, as tokens of its checkpoint."""

from __future__ import annotations

from atom.checkpoint import Tokenizer
from atom.config import Config
from atom.runtime.requests.detokenizer import MARK
from atom.runtime.requests.thinking import ReasoningMarkers


def find_markers(config: Config, tokenizer: Tokenizer | None) -> ReasoningMarkers | None:
    """The markers by which `atom.serve.output.parsers` reads an answer; None if there are none, or no tokenizer."""
    from atom.config.tool_formats import find_channels

    if tokenizer is None:
        return None
    found = find_channels(config, tokenizer.template_text)
    if found is not None and (each := found.channels):
        markers = ReasoningMarkers.encode(f"{each.channel}{each.reasoning}{each.body}", each.end, tokenizer)
    elif config.model.reasoning is not None:
        begin, end = config.model.reasoning
        markers = ReasoningMarkers.encode(begin, [end, *find_call_markers(config, tokenizer)], tokenizer)
    else:
        return None
    return markers if markers.num_tokens <= config.model.vocab else None


def find_call_markers(config: Config, tokenizer: Tokenizer) -> list[str]:
    """The texts with which calls begin, if they are tokens that only calls have: they end the reasoning, too."""
    from atom.config.tool_formats import choose_format, openers, read_format

    name = choose_format(config, tokenizer.template_text)
    if name in (None, "none"):
        return []

    def is_token(text: str) -> bool:
        return len(tokenizer.encode(text, add_special_tokens=False)) == 1

    found = read_format(name)
    marked = openers(found.mark(MARK, is_token)) if found.tokens else []
    return [text.replace(MARK, "") for text in marked if MARK in text]
