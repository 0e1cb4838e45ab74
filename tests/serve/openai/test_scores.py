"""`/score` and `/rerank` against transformers' hidden states, in the schemas of vLLM, Jina and Cohere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from serving import Server
from torch.nn.functional import cosine_similarity

QUERY, DOCUMENTS = "What is it?", ["It is red.", "Bread", "What is it, then?", "It"]
Post = Any


@pytest.fixture(scope="module")
def post(server: Server) -> Post:
    def post(path: str, status: int = 200, **body: Any) -> Any:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    return post


@pytest.fixture(scope="module")
def states(talker: Path) -> Any:
    """The last hidden states of texts."""
    model = transformers.AutoModel.from_pretrained(talker, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(talker)

    @torch.inference_mode()
    def states(texts: list[str], num_tokens: int | None = None) -> torch.Tensor:
        ids = [tokenizer(text).input_ids[:num_tokens] for text in texts]
        return torch.stack([model(torch.tensor([each])).last_hidden_state[0, -1] for each in ids])

    return states


def test_a_score_is_the_cosine_of_one_text_with_each_or_of_pairs(post: Post, states: Any):
    expected = cosine_similarity(states([QUERY]), states(DOCUMENTS)).tolist()
    for path in ("/score", "/v1/score"):
        answer = post(path, model="talker", text_1=QUERY, text_2=DOCUMENTS)
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-4)
        assert [(each["index"], each["object"]) for each in answer["data"]] == [(at, "score") for at in range(4)]
        assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "talker", "score-")
    num_tokens = len(QUERY) + sum(map(len, DOCUMENTS))  # a byte each; the query counts once
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (num_tokens, num_tokens)
    reversed_documents = DOCUMENTS[::-1]
    pairs = cosine_similarity(states(DOCUMENTS), states(reversed_documents)).tolist()
    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        answer = post("/score", **{first: DOCUMENTS, second: reversed_documents})
        assert [each["score"] for each in answer["data"]] == pytest.approx(pairs, abs=1e-4)
    (one,) = post("/score", queries="Bread", documents="Bread")["data"]
    assert one["score"] == pytest.approx(1, abs=1e-6)


def test_documents_are_ranked_and_only_the_first_are_returned(post: Post, states: Any):
    expected = cosine_similarity(states([QUERY]), states(DOCUMENTS))
    order = expected.argsort(descending=True).tolist()
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(path, model="talker", query=QUERY, documents=DOCUMENTS)
        assert [each["index"] for each in answer["results"]] == order
        assert [each["document"] for each in answer["results"]] == [{"text": DOCUMENTS[at]} for at in order]
        scores = [each["relevance_score"] for each in answer["results"]]
        assert scores == pytest.approx(expected[order].tolist(), abs=1e-4)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == len(QUERY + "".join(DOCUMENTS))
    assert set(answer) == {"id", "model", "results", "usage"}
    objects = [{"text": text} for text in DOCUMENTS]
    first = post("/rerank", query=QUERY, documents=objects, top_n=2, return_documents=False)["results"]
    assert [each["index"] for each in first] == order[:2] and set(first[0]) == {"index", "relevance_score"}
    assert len(post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=9)["results"]) == 4


def test_open_webui_and_dify_get_what_they_read(server: Server, states: Any):
    """The bodies of open_webui/retrieval/models/external.py, and of dify_plugin's openai_compatible/rerank.py."""
    expected = cosine_similarity(states([QUERY]), states(DOCUMENTS)).tolist()
    body: dict[str, Any] = {"model": "talker", "query": QUERY, "documents": DOCUMENTS}
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "J%20D", "X-OpenWebUI-User-Role": "user"}
    for more in ({"top_n": len(DOCUMENTS)}, {"top_n": None, "return_documents": True}):
        answer = httpx.post(f"{server.url}/v1/rerank", json=body | more, headers=headers, timeout=60)
        results = sorted(answer.raise_for_status().json()["results"], key=lambda each: each["index"])
        assert [each["relevance_score"] for each in results] == pytest.approx(expected, abs=1e-4)
        assert [each["document"]["text"] for each in results] == DOCUMENTS


def test_the_first_tokens_of_a_text_count(post: Post, states: Any):
    cut = cosine_similarity(states([QUERY], 3), states(DOCUMENTS, 3)).tolist()
    whole = cosine_similarity(states([QUERY]), states(DOCUMENTS, 2)).tolist()
    for expected, fields in ((cut, {"truncate_prompt_tokens": 3}), (whole, {"max_tokens_per_doc": 2})):
        answer = post("/score", text_1=QUERY, text_2=DOCUMENTS, **fields)
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-4)
    by_query = post("/score", text_1=QUERY, text_2=DOCUMENTS, max_tokens_per_query=3, max_tokens_per_doc=3)
    assert [each["score"] for each in by_query["data"]] == pytest.approx(cut, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/score", {"queries": [], "items": ["a"]}, "queries"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"text_1": "a", "documents": "b"}, None),
        ("/score", {"text_1": "a"}, None),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction"),
        ("/rerank", {"query": "a", "documents": ["a" * 9000]}, "documents"),
    ],
)
def test_what_is_wrong_is_refused_by_name(post: Post, path: str, body: dict[str, Any], param: str | None):
    assert post(path, 400, **body)["error"]["param"] == param


def test_without_a_pooling_they_say_how_to_have_one(stub: Server):
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        answer = httpx.post(f"{stub.url}{path}", json=body)
        assert answer.status_code == 400
        assert "set serve.pooler_config.pooling_type=LAST" in answer.json()["error"]["message"]
