"""Make one prompt of a query and a document, by a reranker's template.

    template = PairTemplate.find(config, tokenizer)      # None: the texts follow one another
    template.encode("What is it?", "It is red.")         # token ids
    template.encode("What is it?", "It is red.", {"instruction": "Find facts"}, limit=512)

The template is a chat template that gets two messages, of the roles query and document. An instruction, if there is
one, is both a system message before them, as of sentence-transformers, and the variable `instruction`, as of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atom.checkpoint import Tokenizer
from atom.config import Config
from atom.errors import RequestError

MAX_CUTS = 8  # of a document, each by the tokens that are still too many


@dataclass(frozen=True)
class PairTemplate:
    """A template, and what fills it besides the texts.

    tokenizer: with the template as its default one
    values: variables of the template
    instruction: the system message of requests that bring none
    """

    tokenizer: Tokenizer
    values: Mapping[str, Any]
    instruction: str | None = None

    @staticmethod
    def find(
        config: Config,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> PairTemplate | None:
        """The template of a model's pairs, as its files name it; None: there is none. RequestError if it is missing.

        template: in place of it
        more: variables of the template
        """
        own = config.cross_encoder
        if tokenizer is None or not config.classifies:
            return None
        if template is not None:
            return PairTemplate(tokenizer.with_template(template), more or {})
        if "template" not in own:
            return None
        values = dict(own["template"])
        name = values.pop("chat_template", None)
        if name not in (None, "default"):
            if (text := tokenizer.named_template(name)) is None:
                raise RequestError(f"sentence_bert_config.json names a chat template {name!r}, and there is none")
            tokenizer = tokenizer.with_template(text)
        return PairTemplate(tokenizer, {**values, **(more or {})}, own.get("prompt"))

    def encode(
        self,
        query: str,
        document: str,
        values: Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
        check: Callable[[int], object] = bool,
    ) -> list[int]:
        """The tokens of a pair. RequestError if the template does not show its texts.

        values: more variables of the template; `instruction` goes before its own
        limit: tokens, to which the end of the document is cut
        check: called with the number of tokens of a part before they become a list; it may raise
        """
        asked = (values or {}).get("instruction")
        system = self.instruction if asked is None else str(asked)
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        given = {} if system is None else {"instruction": system}
        variables = {"add_generation_prompt": False, **self.values, **given, **(values or {})}
        before = [] if system is None else [{"role": "system", "content": system}]
        for _ in range(MAX_CUTS):
            messages[1]["content"] = document
            shown = [query, document] if asked is None else [query, document, str(asked)]
            tokens = self.tokenizer.encode_messages(before + messages, shown, check=check, **variables)
            if limit is None or len(tokens) <= limit:
                return tokens
            size = len(self.tokenizer.encode(document, add_special_tokens=False, check=check))
            if size <= len(tokens) - limit:
                break
            document = first_tokens(self.tokenizer, document, size - (len(tokens) - limit))
        raise RequestError(f"the template and the query leave no room for a document in {limit} tokens; allow more")


def refuse_template(chat_template: str | None, values: Mapping[str, Any] | None) -> None:
    """RequestError if a template is given for texts that are compared by their embeddings."""
    if chat_template is not None or values:
        raise RequestError("each text is embedded by itself, so no chat_template makes a prompt of two; leave it out")


def first_tokens(tokenizer: Tokenizer, text: str, number: int) -> str:
    """The beginning of a text that so many tokens spell."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) <= number:
        return text
    return tokenizer.decode(tokens[:number], skip_special_tokens=False).rstrip("\ufffd")
