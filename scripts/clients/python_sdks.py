"""Try a Python client, in an environment that has it; what fails is raised.

    python -P python_sdks.py NAME URL_OF_THE_MODEL CHECKPOINT URL_OF_THE_SCRIPT URL_OF_A_MODEL_THAT_SEES

It prints the client's version. Each streams, calls a tool or gives an object. The model is tiny and its weights are
random, so what is looked at is the form of its answers: grammars make objects of them, and `tool_choice` calls. The
script (scripted_engine.py) calls `add` once, and then says the sum.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

MODEL, KEY, ASKED = "talker", "none", "Which animal?"
# no space in JSON, of which a model without sense would write pages, and no thinking, which it would not end
TERSE = {"logit_bias": dict.fromkeys(("197", "198", "201", "220", "259"), -100), "max_tokens": 200, "temperature": 0}


QUESTION, ANSWER = "What is 2 + 3?", "It is 5."  # of the loop over the script
# a session as Claude Code has them, written by hand: blocks of system, 20 tools, cache_control, results, an error
SESSION = Path(__file__).with_name("claude_session.json")
DOCUMENTS = ["It is a cat.", "Bread", "Which animal is it?"]  # for ASKED


class Server(NamedTuple):
    url: str
    checkpoint: str  # its folder
    script: str  # the URL of another server, whose engine says prepared texts
    seer: str  # of a server that reads images


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


class Animal(BaseModel):
    """Notes an animal."""

    kind: Literal["cat", "dog"]
    is_tame: bool


IMAGE_SIZE, IMAGE_TOKENS = (40, 24), 15  # pixels of an image, of which 8 x 8 are a token


def make_png(shade: int) -> str:
    """A grey image, as base64."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    (width, height), rows = IMAGE_SIZE, bytearray()
    for _ in range(height):
        rows += bytes([0, *[shade] * width])
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    png = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + png).decode()


def try_openai(server: Server) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    messages: Any = [{"role": "user", "content": ASKED}]
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Animal, **TERSE)
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    with client.responses.stream(model=MODEL, input=ASKED, max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds[-1]
    assert len(client.embeddings.create(model=MODEL, input=[ASKED, "b"]).data) == 2
    client = openai.OpenAI(base_url=f"{server.script}/v1", api_key=KEY)
    tools: Any = [{"type": "function", "name": "add", "parameters": ADD}]
    items: Any = [{"role": "user", "content": QUESTION}]
    items += client.responses.create(model=MODEL, input=items, tools=tools).output
    called = json.loads(items[-1].arguments)
    items.append({"type": "function_call_output", "call_id": items[-1].call_id, "output": add(**called)})
    assert client.responses.create(model=MODEL, input=items, tools=tools).output_text == ANSWER
    try_openai_images(openai.OpenAI(base_url=f"{server.seer}/v1", api_key=KEY, max_retries=0))


def try_openai_images(client: Any) -> None:
    """Images count their tokens, in a chat and in a response, streamed or not; a result of a tool may be one."""
    urls = [f"data:image/png;base64,{make_png(shade)}" for shade in (40, 200)]
    texts: Any = [{"type": "text", "text": ASKED}]
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    counts = []
    for content in (texts, [*texts, *parts]):
        messages: Any = [{"role": "user", "content": content}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
        made = client.chat.completions.create(**asked)
        *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (text, last.usage.prompt_tokens) == (made.choices[0].message.content, made.usage.prompt_tokens)
        counts.append(made.usage.prompt_tokens)
    assert counts[1] - counts[0] == len(urls) * IMAGE_TOKENS, counts
    asked = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
    texts, parts = [{"type": "input_text", "text": ASKED}], [{"type": "input_image", "image_url": url} for url in urls]  # type: ignore
    call: Any = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    counts = []
    for shown in ([], parts):
        items = [{"role": "user", "content": [*texts, *shown]}, call]
        items += [{"type": "function_call_output", "call_id": "call_1", "output": [*texts, *shown]}]
        counts.append(client.responses.create(**asked, input=items).usage.input_tokens)
        assert client.responses.input_tokens.count(model=MODEL, input=items).input_tokens == counts[-1]
        with client.responses.stream(**asked, input=items) as stream:
            *_, last = stream
        assert last.response.usage.input_tokens == counts[-1], last.type
    assert counts[1] - counts[0] == 2 * len(urls) * IMAGE_TOKENS, counts


def try_anthropic(server: Server) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key=KEY)
    messages: Any = [{"role": "user", "content": ASKED}]
    with client.messages.stream(model=MODEL, max_tokens=8, messages=messages) as stream:
        events = [event.type for event in stream]
    assert (events[0], events[-1]) == ("message_start", "message_stop"), events
    tools: Any = [{"name": "note", "description": "Notes.", "input_schema": Animal.model_json_schema()}]
    made = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=messages,
        tools=tools,
        thinking={"type": "disabled"},
        tool_choice={"type": "tool", "name": "note"},
    )
    assert made.content[-1].type == "tool_use", made.content
    client = anthropic.Anthropic(base_url=server.script, api_key=KEY)
    messages = [{"role": "user", "content": QUESTION}]
    tools = [anthropic.beta_tool(add)]
    ended = client.beta.messages.tool_runner(model=MODEL, max_tokens=99, messages=messages, tools=tools).until_done()
    assert ended.content[-1].text == ANSWER, ended.content
    try_claude_session(server)
    try_anthropic_images(anthropic.Anthropic(base_url=server.seer, api_key=KEY, max_retries=0))


def try_anthropic_images(client: Any) -> None:
    """Images count their tokens, in a message of the user and in a tool's result."""
    images = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": make_png(shade)}}
              for shade in (40, 200)]  # fmt: skip
    text: Any = {"type": "text", "text": ASKED}
    counts = []
    for shown in ([], images):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text, *shown]}
        messages = [
            {"role": "user", "content": [*shown, text]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ]
        counts.append(client.messages.count_tokens(model=MODEL, messages=messages).input_tokens)
        made = client.messages.create(model=MODEL, max_tokens=4, messages=messages)
        with client.messages.stream(model=MODEL, max_tokens=4, messages=messages) as stream:
            streamed = stream.get_final_message()
        for usage in (made.usage, streamed.usage):
            cached = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
            assert usage.input_tokens + sum(cached) == counts[-1], usage
    assert counts[1] - counts[0] == 2 * len(images) * IMAGE_TOKENS, counts


def try_claude_session(server: Server) -> None:
    import anthropic

    session = json.loads(SESSION.read_text())
    betas: Any = ["claude-code-20250219", "interleaved-thinking-2025-05-14"]
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    cached = []
    for number in (1, 3, 5):
        asked = session | {"messages": session["messages"][:number], "thinking": {"type": "disabled"}}
        counted = {name: value for name, value in asked.items() if name != "metadata"}
        num_tokens = client.beta.messages.count_tokens(model=MODEL, betas=betas, **counted).input_tokens
        with client.beta.messages.stream(model=MODEL, betas=betas, max_tokens=8, **asked) as stream:
            usage = stream.get_final_message().usage
        cached.append(usage.cache_read_input_tokens)
        assert usage.input_tokens + usage.cache_creation_input_tokens + cached[-1] == num_tokens, usage
    assert 1000 < cached[1] < cached[2], cached
    client = anthropic.Anthropic(base_url=server.script, api_key=KEY, max_retries=0)
    asked = session | {"messages": session["messages"][:1], "max_tokens": 32000, "betas": betas, "model": MODEL}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 31999}}
    with client.beta.messages.stream(**asked) as stream:
        answer = stream.get_final_message()
    assert [block.type for block in answer.content] == ["thinking", "tool_use"] and answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": [{"type": "text", "text": "5"}]}
    blocks = [block.model_dump(exclude_none=True) for block in answer.content]
    asked["messages"] += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    with client.beta.messages.stream(**asked) as stream:
        assert stream.get_final_text() == ANSWER


def try_langchain_openai(server: Server) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    bias = {"logit_bias": TERSE["logit_bias"]}
    model: Any = ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key=KEY, max_tokens=200, temperature=0, **bias
    )
    assert "".join(chunk.content for chunk in model.bind(max_tokens=8).stream(ASKED))
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Animal, method=method).invoke(ASKED), Animal), method
    answer = model.bind_tools([Animal], tool_choice="Animal").invoke(ASKED)
    assert answer.tool_calls[0]["name"] == "Animal", answer
    plain = ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key=KEY, use_responses_api=True, max_tokens=16, temperature=0
    )  # type: ignore
    assert plain.invoke(ASKED).content
    texts = OpenAIEmbeddings(model=MODEL, base_url=f"{server.url}/v1", api_key=KEY, check_embedding_ctx_length=False)  # type: ignore
    assert len(texts.embed_documents(["a", "b"])) == 2
    for is_new in (False, True):
        plain = ChatOpenAI(model=MODEL, base_url=f"{server.script}/v1", api_key=KEY, use_responses_api=is_new)  # type: ignore
        messages: Any = [("user", QUESTION)]
        messages.append(plain.bind_tools([add]).invoke(messages))
        messages.append(tool(add).invoke(messages[-1].tool_calls[0]))
        assert plain.bind_tools([add]).invoke(messages).text == ANSWER


def try_pydantic_ai(server: Server) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key=KEY))
    for output in (NativeOutput(Animal), ToolOutput(Animal)):
        made: Any = Agent(model, output_type=output, model_settings=TERSE).run_sync(ASKED)  # type: ignore[arg-type]
        assert isinstance(made.output, Animal), made

    async def stream() -> str:
        settings: Any = {"max_tokens": 8, "temperature": 0}
        async with Agent(model, model_settings=settings).run_stream(ASKED) as run:
            return "".join([text async for text in run.stream_text(delta=True)])

    assert asyncio.run(stream())
    provider = OpenAIProvider(base_url=f"{server.script}/v1", api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert Agent(kind(MODEL, provider=provider), tools=[add]).run_sync(QUESTION).output == ANSWER, kind


def try_openai_agents(server: Server) -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from agents import set_tracing_disabled as leave_traces
    from openai import AsyncOpenAI

    leave_traces(True)
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    settings = ModelSettings(temperature=0, max_tokens=200, extra_body={"logit_bias": TERSE["logit_bias"]})
    for model in (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)):
        made = Runner.run_sync(Agent("a", model=model, model_settings=settings, output_type=Animal), ASKED)
        assert isinstance(made.final_output, Animal), made
    client = AsyncOpenAI(base_url=f"{server.script}/v1", api_key=KEY)
    for model in (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)):
        made = Runner.run_sync(Agent("a", model=model, tools=[function_tool(add)]), QUESTION)
        assert made.final_output == ANSWER, made


def try_instructor(server: Server) -> None:
    import instructor
    import openai

    new = {"temperature": 0, "max_output_tokens": 200, "extra_body": {"logit_bias": TERSE["logit_bias"]}}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY), mode=mode)
        asked: Any = {"messages": [{"role": "user", "content": ASKED}]}
        asked |= new if mode is instructor.Mode.RESPONSES_TOOLS else TERSE
        made = client.chat.completions.create(model=MODEL, response_model=Animal, max_retries=0, **asked)
        assert isinstance(made, Animal), mode


def try_litellm(server: Server) -> None:
    import litellm

    messages = [{"role": "user", "content": ASKED}]
    for name in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}"):
        there = {"model": name, "api_base": f"{server.url}/v1", "api_key": KEY, "messages": messages}
        there |= {"max_tokens": 8, "temperature": 0}  # a drawn token may begin reasoning
        assert litellm.completion(**there).usage.completion_tokens == 8
        text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**there, stream=True))
        assert text, name
    asked = there | TERSE
    made = litellm.completion(**asked, response_format=Animal)
    assert Animal.model_validate_json(made.choices[0].message.content)
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    there |= {"api_base": f"{server.script}/v1", "tools": tools, "messages": [{"role": "user", "content": QUESTION}]}
    message = litellm.completion(**there).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": add(**json.loads(call.function.arguments))}
    there["messages"] += [message, result]
    assert litellm.completion(**there).choices[0].message.content == ANSWER
    for name, url in (
        ("hosted_vllm", server.url),
        ("jina_ai", f"{server.url}/v1/rerank"),
        ("cohere", f"{server.url}/v1/rerank"),
    ):
        asked = {"query": ASKED, "documents": DOCUMENTS, "top_n": 2, "api_base": url, "api_key": KEY}
        check_ranked([each["index"] for each in litellm.rerank(model=f"{name}/{MODEL}", **asked).results], server)
    asked = {"api_base": f"{server.url}/v1", "api_key": KEY, "max_tokens": 8, "temperature": 0}
    made = litellm.batch_completion(model=f"hosted_vllm/{MODEL}", messages=[messages, messages, messages], **asked)
    assert [each.usage.completion_tokens for each in made] == [8] * 3, made


def try_cohere(server: Server) -> None:
    import cohere

    for client in (cohere.Client(KEY, base_url=server.url), cohere.ClientV2(KEY, base_url=server.url)):
        ranked = client.rerank(model=MODEL, query=ASKED, documents=DOCUMENTS, top_n=2).results
        check_ranked([each.index for each in ranked], server)


def try_dify(server: Server) -> None:
    """The model that Dify has for servers that speak OpenAI's API."""
    from dify_plugin.interfaces.model.openai_compatible.rerank import OAICompatRerankModel

    model = OAICompatRerankModel([])
    asked = {"endpoint_url": f"{server.url}/v1", "api_key": KEY}
    ranked = model._invoke(MODEL, asked, ASKED, DOCUMENTS, top_n=2).docs
    check_ranked([each.index for each in ranked], server)
    assert [each.text for each in ranked] == [DOCUMENTS[each.index] for each in ranked]


def check_ranked(found: list[int], server: Server) -> None:
    """Compare the first two documents with those of the most similar embeddings."""
    request = urllib.request.Request(
        f"{server.url}/v1/embeddings",
        json.dumps({"input": [ASKED, *DOCUMENTS]}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        query, *others = [each["embedding"] for each in json.load(answer)["data"]]
    similar = [sum(a * b for a, b in zip(query, each, strict=True)) for each in others]
    assert found == sorted(range(len(similar)), key=lambda at: -similar[at])[:2], (found, similar)


def try_guidellm(server: Server) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        asked = {
            "backend": f"openai_http,target={server.url},model={MODEL}",
            "profile": "synchronous",
            "constraint": "max_requests,count=3",
            "tokenizer": f"hf_auto,model={server.checkpoint}",
            "data": "synthetic_text,prompt_tokens=16,output_tokens=4",
            "output": f"json,path={report}",
        }
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
        command += [part for flag, value in asked.items() for part in (f"--{flag}", f"kind={value}")]
        subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, timeout=300)
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (3, 0, 0), totals


def try_vllm(server: Server) -> None:
    """`vllm bench serve`: random prompts to be completed, and a ShareGPT file's as chats."""
    talk = [{"from": "human", "value": f"{ASKED} {ASKED}"}, {"from": "gpt", "value": "The dog."}]
    with tempfile.TemporaryDirectory() as folder:
        report, conversations = Path(folder, "report.json"), Path(folder, "ShareGPT.json")
        conversations.write_text(json.dumps([{"conversations": talk}] * 3))
        runs = {
            "--backend openai --dataset-name random --random-input-len 16 --random-output-len 8": 24,
            f"--backend openai-chat --endpoint /v1/chat/completions --dataset-name sharegpt "
            f"--dataset-path {conversations}": 3 * len("The dog."),  # its tokens are bytes
        }
        for flags, num_tokens in runs.items():
            command = [
                str(Path(sys.executable).parent / "vllm"),
                "bench",
                "serve",
                "--base-url",
                server.url,
                *flags.split(),
            ]
            command += (
                f"--model {MODEL} --tokenizer {server.checkpoint} --num-prompts 3 --ignore-eos --temperature 0".split()
            )
            command += f"--save-result --result-dir {folder} --result-filename {report.name}".split()
            subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, timeout=300)
            result = json.loads(report.read_text())
            counts = result["completed"], result["failed"], result["total_output_tokens"]
            assert counts == (3, 0, num_tokens), (flags, counts)


CLIENTS: dict[str, Callable[[Server], None]] = {
    "openai": try_openai,
    "anthropic": try_anthropic,
    "langchain-openai": try_langchain_openai,
    "pydantic-ai-slim": try_pydantic_ai,
    "openai-agents": try_openai_agents,
    "instructor": try_instructor,
    "litellm": try_litellm,
    "cohere": try_cohere,
    "dify-plugin": try_dify,
    "guidellm": try_guidellm,
    "vllm": try_vllm,
}


def main(name: str, *server: str) -> None:
    print(version(name), flush=True)
    CLIENTS[name](Server(*server))


if __name__ == "__main__":
    main(*sys.argv[1:])
