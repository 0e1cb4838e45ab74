"""Responses that are stored: the file, and OpenAI's own SDK against servers that keep them."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import serving
import wire

from atom.errors import ConfigError
from atom.serve.openai.response_store import FILE, ResponseStore

SAID = [{"role": "user", "content": "Hello"}]
ROW = len(b'{"id":1}' + b'[{"role":"user","content":"Hello"}]')  # bytes of a response that the tests store


def ids(store: ResponseStore, *tenants: str) -> list[str]:
    return [f"{tenant}{at}" for tenant in tenants for at in range(9) if store.find(f"r{at}", tenant)]


def fill(store: ResponseStore, tenant: str, *numbers: int) -> None:
    for at in numbers:
        assert store.put(f"r{at}", tenant, b'{"id":1}', SAID)


def test_a_response_is_that_of_its_key(tmp_path: Path):
    store = ResponseStore(tmp_path / "store", 1 << 20)
    assert store.put("r", "a", b"{}", SAID) and store.put("r", "b", b"[]", [])
    assert (store.find("r", "a"), store.find("r", "b")) == ((b"{}", SAID), (b"[]", []))
    assert store.find("r", "c") is store.find("other", "a") is None
    assert store.put("r", "a", b"{1}", SAID), "another one in its place"
    assert not store.delete("r", "c") and store.delete("r", "b") and not store.delete("r", "b")
    assert (store.find("r", "a"), store.find("r", "b")) == ((b"{1}", SAID), None)
    store.close()
    again = ResponseStore(tmp_path / "store", 1 << 20)
    assert again.find("r", "a") == (b"{1}", SAID), "it outlives the server"
    again.close()


def test_beyond_its_bytes_the_oldest_goes_of_the_key_that_holds_most(tmp_path: Path):
    store = ResponseStore(tmp_path / "store", 4 * ROW)
    fill(store, "a", 0, 1, 2)
    fill(store, "b", 0)
    fill(store, "a", 3)
    assert ids(store, "a", "b") == ["a1", "a2", "a3", "b0"]
    fill(store, "b", 1, 2)
    assert ids(store, "a", "b") == ["a2", "a3", "b1", "b2"], "a gave up one of three, then b"
    assert not store.put("huge", "a", bytes(4 * ROW), []), "it has no room, and nothing goes for it"
    assert len(ids(store, "a", "b")) == 4
    assert store.delete("r3", "a")
    fill(store, "c", 0)
    assert len(ids(store, "a", "b", "c")) == 4, "what was deleted counts no more"
    store.close()


def test_threads_and_servers_share_the_file(tmp_path: Path):
    stores = [ResponseStore(tmp_path / "store", 1 << 20) for _ in range(2)]
    threads = [threading.Thread(target=fill, args=(stores[at % 2], str(at), *range(9))) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids(stores[0], *"0123")) == len(ids(stores[1], *"0123")) == 4 * 9
    for store in stores:
        store.close()


def test_the_file_is_the_users_own_and_what_is_none_is_reported(tmp_path: Path):
    ResponseStore(tmp_path / "store", 9).close()
    assert (tmp_path / "store" / FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    (tmp_path / "store" / FILE).write_bytes(b"no such file" * 100)
    with pytest.raises(ConfigError, match=r"response_store_bytes: .*responses.sqlite: file is not a database; remove"):
        ResponseStore(tmp_path / "store", 9)
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="is writable by others"):
        ResponseStore(tmp_path / "open", 9)


def test_a_file_that_takes_nothing_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.serve.openai.response_store.WAIT_SECONDS", 0.01)
    store, other = (ResponseStore(tmp_path / "store", 1 << 20) for _ in range(2))
    other._file.execute("BEGIN IMMEDIATE")
    assert not store.put("r", "a", b"{}", SAID)
    other._file.execute("ROLLBACK")
    assert store.put("r", "a", b"{}", SAID)
    store.close()
    other.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.find("r", "a")


ASK: dict[str, Any] = {"model": "talker", "temperature": 0, "max_output_tokens": 12}
KEYS = "first: {key: first-key}\nsecond: {key: second-key}\n"


@pytest.fixture(scope="module")
def keeper(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("keeper")
    (folder / "keys.yaml").write_text(KEYS)
    options = [f"cache={folder / 'cache'}", "level=0", "serve.http.response_store_bytes=1MiB"]
    server = serving.start(talker, folder, *options, f"serve.http.api_keys=@{folder / 'keys.yaml'}")
    yield server.url
    server.process.kill()
    server.process.wait()


def client(url: str, key: str = "first-key") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_fetched_as_it_was_sent_and_deleted(keeper: str, stream: bool):
    mine, others = client(keeper), client(keeper, "second-key")
    made: Any = mine.responses.create(**ASK, input="Hello", stream=stream)
    made = list(made)[-1].response if stream else made
    assert made.store is True and mine.responses.retrieve(made.id).model_dump() == made.model_dump()
    for ask in (others.responses.retrieve, others.responses.delete, others.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"the response {made.id} is not stored here") as refused:
            ask(made.id)
        assert (refused.value.param, refused.value.code) == ("response_id", None)
    with pytest.raises(openai.BadRequestError, match="this response has ended"):
        mine.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="a stored response comes whole"):
        mine.responses.retrieve(made.id, stream=True)
    mine.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        mine.responses.retrieve(made.id)


def test_a_conversation_goes_on_as_if_all_of_it_were_sent(keeper: str):
    mine = client(keeper)
    first = mine.responses.create(**ASK, input="Hello", instructions="Be kind.")
    second = mine.responses.create(**ASK, input="And then?", previous_response_id=first.id)
    third = mine.responses.create(**ASK, input=[{"role": "user", "content": "Now?"}], previous_response_id=second.id)
    whole: list[Any] = [{"role": "user", "content": "Hello"}, *first.output]
    for response, text in ((second, "And then?"), (third, "Now?")):
        whole.append({"role": "user", "content": text})
        same = mine.responses.create(**ASK, input=whole, store=False)
        assert response.output_text == same.output_text != "" and response.usage is not None and same.usage is not None
        assert response.usage.input_tokens == same.usage.input_tokens, "without the instructions, as OpenAI has it"
        counted = mine.responses.input_tokens.count(
            model="talker", input=text, previous_response_id=response.previous_response_id
        )
        assert counted.input_tokens == response.usage.input_tokens
        whole += response.output
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    mine.responses.delete(first.id)
    assert mine.responses.create(**ASK, input="So?", previous_response_id=second.id).output_text, "it holds all of it"


def test_a_response_that_nobody_may_continue_is_refused(keeper: str):
    mine = client(keeper)
    kept_out = mine.responses.create(**ASK, input="Hello", store=False)
    assert kept_out.store is False
    others = client(keeper, "second-key").responses.create(**ASK, input="Hello")
    for id in (kept_out.id, others.id, "resp_nothing"):
        with pytest.raises(openai.BadRequestError, match=f"previous_response_id: the response {id} is not") as refused:
            mine.responses.create(**ASK, input="Go on.", previous_response_id=id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_call_and_its_result_are_of_two_requests(keeper: str):
    tool = {
        "type": "function",
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["cat"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    }
    terse = {"extra_body": {"logit_bias": dict.fromkeys(("197", "198", "201", "220", "259"), -100)}}
    asked: dict[str, Any] = ASK | {"tools": [tool], "max_output_tokens": 200} | terse
    mine = client(keeper)
    made = mine.responses.create(**asked, input="Hello", tool_choice="required", parallel_tool_calls=False)
    (call,) = made.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "an animal"}
    told = mine.responses.create(**asked, input=[result], previous_response_id=made.id)
    whole: Any = [{"role": "user", "content": "Hello"}, call, result]
    same = mine.responses.create(**asked, input=whole)
    assert told.output_text == same.output_text and told.usage is not None and same.usage is not None
    assert told.usage.input_tokens == same.usage.input_tokens


def test_routes_of_stored_responses_need_their_key(keeper: str):
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert wire.ask(keeper, method, f"/v1/responses/resp_1{path}").status == 401
