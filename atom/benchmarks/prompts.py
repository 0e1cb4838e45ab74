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
    prompt: str | list[int]
    prompt_len: int  # tokens, as the server counts them
    expected_output_len: int  # tokens


@dataclass(frozen=True)
class PromptForm:
    tokenizer: Tokenizer
    is_chat: bool = False  # the server puts the text into its chat template
    use_chat_template: bool = False  # the client does

    def word(self, text: str) -> str:
        return self.tokenizer.apply_template(text) if self.use_chat_template else text

    def count(self, text: str) -> int:
        """The tokens of a prompt; a template has its special tokens, the server adds its own to any other text."""
        if self.is_chat and self.tokenizer.has_template:
            return len(self.tokenizer.encode(self.tokenizer.apply_template(text), add_special_tokens=False))
        return len(self.tokenizer.encode(self.word(text)))
