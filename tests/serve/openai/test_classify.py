"""`/classify`, and `/score` and `/rerank` by a classifier, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from serving import Server, Start

TEMPLATE = "".join(
    f"{role}: {{{{ messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first | default('') }}}}\n"
    for role in ("system", "query", "document")
)


def test_a_classifiers_routes_give_what_transformers_gives(talker: Path, start_server: Start, tmp_path: Path):
    folder = tmp_path / "classifier"
    config = transformers.AutoConfig.from_pretrained(talker)
    config.update({"pad_token_id": 0, "num_labels": 1})
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((talker / name).read_text())
    (folder / "chat_template.jinja").write_text(TEMPLATE + "\n")  # which Jinja drops
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    (folder / "sentence_bert_config.json").write_text('{"modality_config": {"message": {"format": "flat"}}}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    documents = ["It is.", "Bread"]
    ids = [tokenizer(f"Red? {each}").input_ids for each in documents]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def scores_of(texts: list[str]) -> list[float]:
        ids = [tokenizer(each).input_ids for each in texts]
        return [model(torch.tensor([each])).logits.sigmoid().item() for each in ids]

    def scores_in_template(texts: list[str], instruction: str = "", query: str = "Red?") -> list[float]:
        return scores_of([f"system: {instruction}\nquery: {query}\ndocument: {each}\n" for each in texts])

    expected = scores_of([f"Red? {each}" for each in documents])
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

    def score(texts: list[str] = documents, **body: Any) -> list[float]:
        scored = post("/score", text_1="Red?", text_2=texts, **body)["data"]
        ranked = post("/rerank", query="Red?", documents=texts, **body)["results"]
        by_index = {each["index"]: each["relevance_score"] for each in ranked}
        assert [by_index[each["index"]] for each in scored] == pytest.approx(
            [each["score"] for each in scored], abs=1e-5
        )
        return [each["score"] for each in scored]

    assert score() == pytest.approx(scores_in_template(documents), abs=1e-4)
    asked = pytest.approx(scores_in_template(documents, "Find bread"), abs=1e-4)
    assert score(instruction="Find bread") == asked == score(chat_template_kwargs={"instruction": "Find bread"})
    cut = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    assert score(**cut) == pytest.approx(scores_in_template(["It ", "Bre"], query="Re"), abs=1e-4)
    size = len("system: \nquery: Red?\ndocument: Bread\n") - 2  # a byte each
    long = ["Bread" * 50, "Bread"]
    assert score(long, truncate_prompt_tokens=size) == pytest.approx(scores_in_template(["Bre", "Bre"]), abs=1e-4)
    assert post("/score", text_1="Red?", text_2=long, truncate_prompt_tokens=size)["usage"]["prompt_tokens"] == 2 * size
    refused = post("/score", 400, text_1="Red?", text_2="Bread", truncate_prompt_tokens=20)["error"]["message"]
    assert refused == "the template and the query leave no room for a document in 20 tokens; allow more"
    for body in ({}, {"task": "classify"}):
        pooled = post("/pooling", input=[f"Red? {each}" for each in documents], **body)["data"]
        assert [each["data"][0] for each in pooled] == pytest.approx(expected, abs=1e-4)
        assert [(each["index"], each["object"]) for each in pooled] == [(0, "pooling"), (1, "pooling")]
    (embedded,) = post("/pooling", input="Red?", task="embed", dimensions=8)["data"]
    (same,) = post("/v1/embeddings", input="Red?", dimensions=8)["data"]
    assert embedded["data"] == pytest.approx(same["embedding"], abs=1e-6)
    assert post("/pooling", 400, input="Red?", dimensions=8)["error"]["param"] == "dimensions"
    assert post("/rerank", 400, query="a", documents=["b" * 9000])["error"]["param"] == "documents"


def test_a_model_without_labels_says_so(server: Server):
    answer = httpx.post(f"{server.url}/classify", json={"input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("this model has no labels: its checkpoint is no classifier")
