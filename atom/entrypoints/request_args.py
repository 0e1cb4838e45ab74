"""Flags of commands that answer OpenAI's requests, from a socket or a file."""

from __future__ import annotations

from dataclasses import dataclass

from atom.config.spelling import override
from atom.config.typed_json import read_object
from atom.entrypoints.args import BOTH, flag, json_text
from atom.entrypoints.vllm_args import VLLMArgs, vllm_flag


def write_template_kwargs(text: str) -> list[str]:
    name = f"--default-chat-template-kwargs={text}"
    return [override("serve.http.chat_template_kwargs", read_object(name, text))]


@dataclass
class RequestArgs(VLLMArgs):
    """The values of the flags; None for a flag that was not given."""

    served_model_name: tuple[str, ...] | None = vllm_flag(
        "serve.http.served_model_name", "what requests may call the model", null="the checkpoint's name", of=BOTH
    )
    chat_template: str | None = vllm_flag(
        "serve.http.chat_template", "a file with a jinja template", null="the checkpoint's", of=BOTH
    )
    default_chat_template_kwargs: str | None = flag(
        "serve.http.chat_template_kwargs",
        "JSON of variables of the template, under a request's own chat_template_kwargs",
        read=json_text,
        write=write_template_kwargs,
    )
    tool_calls: str | None = flag(
        "serve.http.tool_calls", "their format: auto, none, a name in conf/tool_calls, or a YAML file", of=()
    )
