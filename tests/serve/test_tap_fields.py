"""Taps and steering over HTTP: transformers' hidden states, in base64, by OpenAI's own SDK."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import serving
import tiny
import torch
from hooked import FIRST, SECOND, pooled, states_of, steered
from safetensors.torch import save_file

VECTOR = torch.randn(48, generator=torch.Generator().manual_seed(0))
PROMPT = tiny.prompt(20)
ASKED: dict[str, Any] = {"model": "talker", "prompt": PROMPT, "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def client(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("steering")
    save_file({FIRST: VECTOR}, folder / "calm.safetensors")
    fields = [f"passes.taps=[{FIRST},{SECOND}]", f"passes.steer={{calm: '{folder / 'calm.safetensors'}'}}"]
    with (
        serving.started(talker, folder, *fields) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def model(talker: Path) -> Any:
    return tiny.reference(talker)


def read(tapped: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(b64decode(tapped["data"]), tapped["dtype"]).reshape(tapped["shape"])


def test_choices_have_what_they_tap(client: openai.OpenAI, model: Any):
    taps = {FIRST: "mean", SECOND: "all"}
    with steered(model, {FIRST: VECTOR}, 2.0):
        body = {"taps": taps, "steer": {"calm": 2.0}, "return_token_ids": True}
        (choice,) = client.completions.create(**ASKED, extra_body=body).choices
        tokens = [*PROMPT, *choice.to_dict()["token_ids"][:-1]]
        *_, last = client.completions.create(**ASKED, stream=True, extra_body=body)
        for given in (choice, last.choices[0]):
            found = given.to_dict()["taps"]
            assert found.keys() == taps.keys()
            for layer, pool in taps.items():
                expected = pooled(states_of(model, layer, tokens), pool, len(PROMPT))
                np.testing.assert_allclose(read(found[layer]), expected, atol=1e-4 * np.abs(expected).max())


def test_responses_and_messages_have_what_they_tap(client: openai.OpenAI, model: Any):
    asked = {"taps": {SECOND: "last"}, "steer": {"calm": 2.0}}
    base: dict[str, Any] = {"model": "talker", "temperature": 0}
    response: dict[str, Any] = {**base, "input": "Hello", "max_output_tokens": 1}
    message: dict[str, Any] = {**base, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    url = str(client.base_url).removesuffix("/v1/")
    with httpx.Client(base_url=url, timeout=60) as http:
        tokens = http.post("/tokenize", json={"messages": message["messages"]}).json()["tokens"]
        with steered(model, {FIRST: VECTOR}, 2.0):
            expected = pooled(states_of(model, SECOND, tokens), "last", len(tokens))
        for path, body in (("/v1/responses", response), ("/v1/messages", message)):
            assert "taps" not in http.post(path, json=body).json()
            whole = http.post(path, json=body | asked).json()
            lines = http.post(path, json=body | asked | {"stream": True}).text.splitlines()
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            (last,) = [found for each in events for found in (each, each.get("response", {})) if "taps" in found]
            for given in (whole, last):
                np.testing.assert_allclose(read(given["taps"][SECOND]), expected, atol=1e-4 * np.abs(expected).max())
            wrong = http.post(path, json=body | {"taps": ["model.layers.2"]})
            assert wrong.status_code == 400 and "taps: 'model.layers.2' is not registered" in wrong.text


def test_wrong_names_are_refused(client: openai.OpenAI):
    for asked, message in (
        ({"taps": ["model.layers.2"]}, "taps: 'model.layers.2' is not registered (registered: model.layers.0, model"),
        ({"steer": {"wild": 1.0}}, "steer: 'wild' is not registered (registered: calm)"),
        ({"taps": {FIRST: "max"}}, f" - taps.{FIRST}: Input should be 'last', 'mean' or 'all'|"),
        ({"steer": {"calm": "x"}}, " - steer.calm: Input should be a valid number|"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**ASKED, extra_body=asked)
        assert message in f"{refused.value}|"
