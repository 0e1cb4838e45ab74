"""`/classify`, and `/score` and `/rerank` by a classifier, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from serving import Server, Start


def test_a_classifiers_routes_give_what_transformers_gives(talker: Path, start_server: Start, tmp_path: Path):
    folder = tmp_path / "classifier"
    config = transformers.AutoConfig.from_pretrained(talker)
    config.update({"pad_token_id": 0, "num_labels": 1})
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((talker / name).read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    documents = ["It is.", "Bread"]
    ids = [tokenizer(f"Red? {each}").input_ids for each in documents]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = [model(torch.tensor([each])).logits.sigmoid().item() for each in ids]
    server = start_server(f"checkpoint={folder}")

    def post(path: str, status: int = 200, **body: Any) -> Any:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    labels = post("/classify", input=[f"Red? {each}" for each in documents])
    assert [each["probs"][0] for each in labels["data"]] == pytest.approx(expected, abs=1e-4)
    assert [(each["index"], each["label"], each["num_classes"]) for each in labels["data"]] == [
        (0, "LABEL_0", 1),
        (1, "LABEL_0", 1),
    ]
    assert labels["usage"]["prompt_tokens"] == sum(map(len, ids)) and labels["id"].startswith("classify-")
    scored = post("/score", text_1="Red? ", text_2=documents)
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-4)
    ranked = post("/rerank", query="Red? ", documents=documents)["results"]
    assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(
        dict(enumerate(expected)), abs=1e-4
    )
    for body in ({}, {"task": "classify"}):
        pooled = post("/pooling", input=[f"Red? {each}" for each in documents], **body)["data"]
        assert [each["data"][0] for each in pooled] == pytest.approx(expected, abs=1e-4)
        assert [(each["index"], each["object"]) for each in pooled] == [(0, "pooling"), (1, "pooling")]
    (embedded,) = post("/pooling", input="Red?", task="embed", dimensions=8)["data"]
    (same,) = post("/v1/embeddings", input="Red?", dimensions=8)["data"]
    assert embedded["data"] == pytest.approx(same["embedding"], abs=1e-6)
    assert post("/pooling", 400, input="Red?", dimensions=8)["error"]["param"] == "dimensions"
    refused = post("/score", 400, text_1="a", text_2="b", max_tokens_per_doc=3)
    assert refused["error"]["param"] == "max_tokens_per_doc"


def test_a_model_without_labels_says_so(server: Server):
    answer = httpx.post(f"{server.url}/classify", json={"input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("this model has no labels: its checkpoint is no classifier")
