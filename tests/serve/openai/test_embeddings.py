"""`/v1/embeddings` by OpenAI's SDK, against transformers' hidden states; its fields and refusals."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from serving import Server

TOKENS = list(range(20, 60))


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_sdk_gets_the_normalized_last_state_in_base64_and_as_numbers(client: openai.OpenAI, talker: Path):
    model = transformers.AutoModel.from_pretrained(talker, dtype=torch.float32)
    with torch.inference_mode():
        state = model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
    unit = (state / state.norm()).tolist()
    answer = client.embeddings.create(model="talker", input=TOKENS)  # the SDK asks for base64
    assert answer.data[0].embedding == pytest.approx(unit, abs=1e-4)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "talker", "embedding")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (40, 40)
    plain = client.embeddings.create(model="talker", input=[[1, 2], TOKENS], encoding_format="float")
    assert [each.index for each in plain.data] == [0, 1] and plain.usage.prompt_tokens == 42
    assert plain.data[1].embedding == pytest.approx(unit, abs=1e-4)
    short = client.embeddings.create(model="talker", input=TOKENS, dimensions=8)
    first = state[:8] / state[:8].norm()
    assert short.data[0].embedding == pytest.approx(first.tolist(), abs=1e-4)
    raw = client.embeddings.create(model="talker", input=TOKENS, extra_body={"normalize": False})
    assert raw.data[0].embedding == pytest.approx(state.tolist(), abs=1e-3)


def test_texts_are_their_tokens_and_are_cut_after_the_first_ones(client: openai.OpenAI, server: Server):
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "Hello you"}).json()["tokens"]
    both = client.embeddings.create(model="talker", input=["Hello you", "Hello"])
    for given, cut in ((tokens, {}), ("Hello you and others", {"truncate_prompt_tokens": len(tokens)})):
        same = client.embeddings.create(model="talker", input=given, extra_body=cut).data[0].embedding
        assert np.dot(same, both.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert np.dot(both.data[0].embedding, both.data[1].embedding) < 0.999


def test_what_is_wrong_is_refused_by_name(client: openai.OpenAI):
    wrong = {"dimensions": 49, "truncate_prompt_tokens": 0, "input": [999], "encoding_format": "int8"}
    for name, value in wrong.items():
        body = {"input": "Hello"} | {name: value}
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="talker", input=body.pop("input"), extra_body=body)
        assert refused.value.param == name
