"""Turn a text into the prompt that is sent, and count its tokens.

form = PromptForm(tokenizer, is_chat=False, use_chat_template=True)
form.word("Hello")          # "<|user|>Hello<|assistant|>": what is sent
form.count("Hello")         # the tokens that the server makes of it
"""

from __future__ import annotations

from dataclasses import dataclass

from atom.benchmarks.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleRequest:
    """A turn of a conversation; most data sets have conversations of one turn."""

    prompt: str | list[int]  # what follows the answer before it
    prompt_len: int  # tokens, as the server counts them
    expected_output_len: int  # tokens
    delay: float = 0.0  # seconds from the answer before it; of a first turn, from its arrival


Conversation = list[SampleRequest]  # the turns, of which each is sent after the answer to the one before it


@dataclass(frozen=True)
class PromptForm:
    tokenizer: Tokenizer
    is_chat: bool = False  # the server puts the text into its chat template
    use_chat_template: bool = False  # the client does
    is_part: bool = False  # a text continues a prompt: nothing is added to it

    def word(self, text: str) -> str:
        return self.tokenizer.apply_template(text) if self.use_chat_template else text

    def count(self, text: str) -> int:
        """The tokens of a prompt; a template has its special tokens, the server adds its own to any other text."""
        if self.is_part:
            return len(self.tokenizer.encode(text, add_special_tokens=False))
        if self.is_chat and self.tokenizer.has_template:
            return len(self.tokenizer.encode(self.tokenizer.apply_template(text), add_special_tokens=False))
        return len(self.tokenizer.encode(self.word(text)))
