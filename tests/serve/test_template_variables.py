from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripted
from scripted import Said
from tokenizers import Tokenizer as Backend
from tokenizers import models

from atom.checkpoint import Tokenizer
from atom.checkpoint.chat_template import find_levels
from atom.config.load import load
from atom.serve.context import Context
from atom.serve.template_variables import effort_variables

RAISES = """{% set level = reasoning_effort | default('xhigh') %}
{% if level not in ('xhigh', 'medium', 'low') %}{{ raise_exception('no') }}{% endif %}"""
COMPARES = "{% if (reasoning_effort or 'low') | lower == 'low' %}a{% elif reasoning_effort == 'high' %}b{% endif %}"
LISTS = "{% set known = ['none', 'high'] %}{% if reasoning_effort in known %}{{ reasoning_effort }}{% endif %}"
MAPS = "{{ {'low': 1, 'medium': 2, 'max': 3}[reasoning_effort] }}"
ANY = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
ONE = "{% if reasoning_effort == 'max' %}Think long.{% endif %}"
SWITCH = "{% if not enable_thinking %}</think>{% endif %}"
OTHER = "{% if mode == 'low' or style in ('high', 'max') %}a{% endif %}{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "levels"),
    [
        (RAISES, ("low", "medium", "xhigh")),
        (COMPARES, ("low", "high")),
        (LISTS, ("none", "high")),
        (MAPS, ("low", "medium", "max")),
        (ANY, ()),
        (ONE, ("max",)),
        (OTHER, ()),
    ],
)
def test_the_levels_of_a_template_are_those_that_it_compares_the_effort_with(template: str, levels: tuple[str, ...]):
    assert find_levels(template) == levels


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        (RAISES, "minimal", {"reasoning_effort": "low"}),
        (RAISES, "medium", {"reasoning_effort": "medium"}),
        (RAISES, "high", {"reasoning_effort": "xhigh"}),
        (RAISES, "max", {"reasoning_effort": "xhigh"}),
        (COMPARES, "xhigh", {"reasoning_effort": "high"}),
        (COMPARES, "none", {"reasoning_effort": "low"}),
        (LISTS, "none", {"reasoning_effort": "none"}),
        (LISTS, "max", {"reasoning_effort": "high"}),
        (ANY, "minimal", {"reasoning_effort": "low"}),
        (ANY, "xhigh", {"reasoning_effort": "high"}),
        (ANY, None, {}),
        (ONE, "low", {"reasoning_effort": "low"}),
        (ONE, "max", {"reasoning_effort": "max"}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "low", {}),
        (RAISES + SWITCH, "none", {"enable_thinking": False}),
        (RAISES + SWITCH, "low", {"reasoning_effort": "low"}),
        (LISTS + SWITCH, "none", {"reasoning_effort": "none"}),
        ("{{ messages }}", "none", {}),
    ],
)
def test_an_effort_is_the_nearest_level_of_the_template(template: str, effort: str | None, variables: dict[str, Any]):
    tokenizer = Tokenizer(Backend(models.BPE({}, [])), templates={"default": template})
    assert effort_variables(tokenizer, effort) == variables


HELLO = [{"role": "user", "content": "Hello"}]
ONE_TOKEN = {"model": "talker", "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "reasoning_effort": "high"}),
        ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "high"}}),
        ("/v1/messages", {"messages": HELLO, **ONE_TOKEN, "output_config": {"effort": "high"}}),
    ],
)
def test_each_api_gives_the_template_its_level_before_that_of_the_server(talker: Path, path: str, body: dict[str, Any]):
    config = load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]",
                   "serve.http.chat_template_kwargs={reasoning_effort:low,mood:dry}"])  # fmt: skip

    def use(context: Context) -> None:
        context.tokenizer = context.need_tokenizer().with_template(RAISES + "{{ level }} {{ mood }}")

    prompts = []
    for asked in (body, {name: value for name, value in body.items() if name in ("messages", "input", *ONE_TOKEN)}):
        response, (seen,) = scripted.post(config, Said(["Hi"]), asked, path, before=use)
        assert response.status_code == 200, response.text
        prompts.append(bytes(seen.prompt))
    assert [len(prompt) for prompt in prompts] == [len("xhigh dry"), len("low dry")]
