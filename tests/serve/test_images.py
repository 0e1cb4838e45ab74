"""Images of the APIs, over an engine that a test plays, and over a model that reads them."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pixtral
import pytest
import scripted
from PIL import Image
from scripted import Said

from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config
from atom.config.load import load
from atom.config.schema import MergerConfig, VideoConfig, VisionConfig
from atom.images.reader import ImageReader
from atom.images.types import placeholder
from atom.runtime.images.placeholders import check_images
from atom.serve.context import NUM_THREADS
from atom.serve.prompt_images import GivenImage, PromptImages

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOKEN = 258  # <|endoftext|>, which stands for an image here
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == "image" %}<|endoftext|>{% elif part.type == "video" %}[~]{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def png(width: int = 16, height: int = 8, color: tuple[int, int, int] = (200, 30, 60)) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(data: str) -> str:
    return f"data:image/png;base64,{data}"


RED, BLUE = png(), png(color=(0, 0, 255))
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def config(talker: Path) -> Config:
    """A model with a tower, as far as the HTTP process knows."""
    found = load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[m]"])
    vision = VisionConfig(patch=4, merger=MergerConfig(side=2), min_pixels=64, max_pixels=4096, token=TOKEN)
    return replace(
        found,
        model=replace(found.model, vision=vision),
        serve=replace(found.serve, images=True, max_images=3, max_image_pixels=10_000),
    )


def ask(config: Config, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The answer, and what the engine was asked."""

    def use_template(context: Any) -> None:
        context.tokenizer = context.tokenizer.with_template(TEMPLATE)

    answer, seen = scripted.post(config, Said(["Hi"]), {"model": "m"} | body, path, before=use_template)
    if seen:
        check_images(seen[0].prompt, seen[0].options.images, 1 << 20, 1 << 20)
    return answer, seen[0] if seen else None


def bodies(*images: str) -> dict[str, dict[str, Any]]:
    """A message of the user with images around a text, in each API."""
    first, *rest = images

    def around(make: Any, text: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [make(first), text, *map(make, rest)]}]

    def block(data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    text = {"type": "text", "text": "What?"}
    chat = around(lambda data: {"type": "image_url", "image_url": {"url": url(data)}}, text)
    items = around(
        lambda data: {"type": "input_image", "image_url": url(data)}, {"type": "input_text", "text": "What?"}
    )
    return {
        CHAT: {"messages": chat},
        RESPONSES: {"input": items},
        MESSAGES: {"max_tokens": 5, "messages": around(block, text)},
    }


def spelled(config: Config, prompt: list[int]) -> str:
    return scripted.decode(config, [TOKEN if token < 0 else token for token in prompt])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_images_come_to_the_engine_with_placeholders_in_their_places(config: Config, path: str):
    answer, seen = ask(config, path, bodies(RED, BLUE)[path])
    assert answer.status_code == 200, answer.text
    rows = "<|endoftext|>" * 2  # 8 x 16 pixels: two squares of 8
    assert spelled(config, seen.prompt).startswith(f"<|im_start|>user\n{rows}What?{rows}<|im_end|>\n")
    first, second = seen.options.images
    assert first.image.grids == ((1, 2, 4),) and first.image.digest != second.image.digest
    assert seen.prompt[first.start : first.stop] == [placeholder(first.image.digest, row) for row in range(2)]
    usage = answer.json()["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(seen.prompt)


def test_counts_and_tokens_have_the_rows_of_images(config: Config):
    _, seen = ask(config, MESSAGES, bodies(RED)[MESSAGES])
    counted, _ = ask(config, f"{MESSAGES}/count_tokens", {"messages": bodies(RED)[MESSAGES]["messages"]})
    assert counted.json() == {"input_tokens": len(seen.prompt)}
    tokenized, _ = ask(config, "/tokenize", {"messages": bodies(RED)[CHAT]["messages"]})
    assert tokenized.json()["tokens"] == [TOKEN if token < 0 else token for token in seen.prompt]
    counted, _ = ask(config, f"{RESPONSES}/input_tokens", bodies(RED)[RESPONSES])
    assert counted.json()["input_tokens"] == len(seen.prompt)
    shown, _ = ask(config, CHAT, bodies(RED)[CHAT] | {"return_token_ids": True})
    assert shown.json()["prompt_token_ids"] == tokenized.json()["tokens"]


def test_lines_of_an_image_end_with_tokens_of_their_own(tmp_path: Path):
    pixtral.save("Mistral3", tmp_path)
    config = load([f"checkpoint={tmp_path}", "job=serve", "dtype=fp32", "serve.http.served_model_name=[m]"])
    messages = bodies(png(30, 20), png(9, 8))[CHAT]["messages"]
    answer, (seen,) = scripted.post(config, Said(["Hi"]), {"model": "m", "messages": messages}, CHAT)
    assert answer.status_code == 200, answer.text
    row, line, end = [pixtral.IMAGE] * 4, pixtral.BREAK, pixtral.END
    text = load_tokenizer(tmp_path).encode("What?")
    tokens = [1, 3, *row, line, *row, line, *row, end, *text, *row[:2], end, 4]
    assert [pixtral.IMAGE if token < 0 else token for token in seen.prompt] == tokens
    tokenized, _ = scripted.post(config, Said(["Hi"]), {"messages": messages}, "/tokenize")
    assert tokenized.json()["tokens"] == tokens


def test_detail_low_makes_an_image_small(config: Config):
    vision = replace(config.model.vision, max_pixels=1 << 24)
    large = replace(
        config,
        model=replace(config.model, vision=vision),
        serve=replace(config.serve, max_image_pixels=1 << 24, max_patches=1 << 20),
    )
    rows = []
    for detail in ("low", "high"):
        part = {"type": "image_url", "image_url": {"url": url(png(800, 800)), "detail": detail}}
        answer, _ = ask(large, "/tokenize", {"messages": [{"role": "user", "content": [part]}]})
        rows.append(answer.json()["tokens"].count(TOKEN))
    assert rows == [64 * 64, 100 * 100]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_an_image_of_a_result_is_read_and_a_damaged_one_is_a_text(config: Config, path: str):
    for data, shown in ((RED, "<|endoftext|>" * 2), ("aaaa", "[image: not shown to this model]")):
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": [picture]}
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        asked = {"role": "user", "content": "See."}
        body = {
            CHAT: {"messages": [asked, {"role": "assistant", "tool_calls": [CALL]}, {
                "role": "tool", "tool_call_id": "call_1",
                "content": [{"type": "image_url", "image_url": {"url": url(data)}}]}]},
            RESPONSES: {"input": [asked, {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}, {
                "type": "function_call_output", "call_id": "call_1",
                "output": [{"type": "input_image", "image_url": url(data)}]}]},
            MESSAGES: {"max_tokens": 5, "messages": [
                asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]},
        }[path]  # fmt: skip
        answer, seen = ask(config, path, body)
        assert answer.status_code == 200, answer.text
        assert f"tool\n{shown}<|im_end|>" in spelled(config, seen.prompt)


@pytest.fixture(scope="module")
def filming(config: Config) -> Config:
    """The model takes videos, too, in place of [~]."""
    tower = config.model.vision
    assert tower is not None
    tokenizer = load_tokenizer(Path(str(config.checkpoint)))
    assert tokenizer is not None
    (token,) = tokenizer.encode("~", add_special_tokens=False)
    video = VideoConfig(token, "<{seconds:.1f} s>\n[{rows}]", min_pixels=512, max_pixels=512)
    return replace(config, model=replace(config.model, vision=replace(tower, frames=2, video=video)))


def clip(*frames: str, fps: float | None = None) -> list[dict[str, Any]]:
    """Parts with one video."""
    listed = {"type": "video", "video": list(map(url, frames)), "fps": fps}
    joined = {"url": f"data:video/jpeg;base64,{','.join(frames)}", "fps": fps}
    return [listed, {"type": "video_url", "video_url": joined}]


def test_frames_of_a_video_come_to_the_engine_as_images_with_times(filming: Config):
    for part in clip(RED, BLUE, BLUE, fps=4.0):
        body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]}
        answer, seen = ask(filming, CHAT, body)
        assert answer.status_code == 200, answer.text
        rows = "<|endoftext|>" * 2  # 8 x 16 pixels
        expected = f"<|im_start|>user\n<0.1 s>\n[{rows}]<0.5 s>\n[{rows}]What?<|im_end|>\n"
        assert spelled(filming, seen.prompt).startswith(expected)
        first, second = seen.options.images
        assert first.image.digest != second.image.digest and len(first.image.pixels) == 2 * 3 * 8 * 16
        assert seen.prompt[second.start] == placeholder(second.image.digest, 0)
        tokenized, _ = ask(filming, "/tokenize", {"messages": body["messages"]})
        video = filming.model.vision.video.token
        assert tokenized.json()["tokens"] == [video if token < 0 else token for token in seen.prompt]


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([RED], "messages.0.content.0: a video has too few frames (1); give 2 or more, or an image"),
        ([RED, png(8, 8)], "messages.0.content.0: the frames of a video differ in size; give all of one"),
        ([RED, "AAAA"], "messages.0.content.0: the image is none of PNG, JPEG, WEBP, GIF"),
        ([RED] * 4, "a request may have 3 images (serve.max_images), and this has 4"),
    ],
)
def test_a_video_that_cannot_be_read_is_a_fault_of_the_request(filming: Config, frames: list[str], says: str):
    for part in clip(*frames):
        answer, seen = ask(filming, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.status_code == 400 and seen is None
        assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("given", ["data:video/mp4;base64,AAAA", "https://example.org/a.mp4", "data:video/jpeg;base64"])
def test_a_file_of_a_video_is_refused_as_one(filming: Config, config: Config, given: str):
    part = {"type": "video_url", "video_url": {"url": given}}
    for own, says in ((filming, "a video has no frames: give their URLs, or data:video/jpeg;base64,"),
                      (config, "video_url blocks are not supported here (supported: text, image_url)")):  # fmt: skip
        answer, _ = ask(own, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.status_code == 400 and f"messages.0.content.0: {says}" in answer.json()["error"]["message"]


def test_a_model_without_videos_refuses_them_but_in_results_of_tools(config: Config):
    for part in clip(RED, BLUE):
        answer, _ = ask(config, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        says = f"messages.0.content.0: {part['type']} blocks are not supported here (supported: text, image_url)"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)
        result = {"role": "tool", "tool_call_id": "call_1", "content": [part]}
        answer, seen = ask(config, CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}, result]})
        assert answer.status_code == 200 and "[video: not shown to this model]" in spelled(config, seen.prompt)


def test_a_type_of_another_api_is_refused_with_that_of_images_here(config: Config):
    types = {CHAT: ("input_image", "text; image_url"), MESSAGES: ("image_url", "text, thinking, tool_use, tool_result; image"),
             RESPONSES: ("image_url", "input_text, output_text, reasoning_text; input_image")}  # fmt: skip
    for path, (given, known) in types.items():
        messages = [{"role": "user", "content": [{"type": given, "image_url": url(RED)}]}]
        body = {"input": messages} if path == RESPONSES else {"messages": messages, "max_tokens": 5}
        answer, _ = ask(config, path, body)
        says = f"content.0: {given} blocks are not supported here (supported: {known}, if the model reads images)"
        assert answer.status_code == 400 and says in answer.text


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "video", "video": [url(RED)] * 2, "fps": 0}, "messages.0.content.0.fps: Input should be greater than 0"),
        ({"type": "video", "video": [url(RED), 5]}, "messages.0.content.0.video.1: Input should be a valid string"),
        ({"type": "image_url", "image_url": None}, "messages.0.content.0.image_url: Input should be"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages.0.content.0.image_url.url: Input should be"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_part_is_named(config: Config, part: dict[str, Any], says: str):
    answer, _ = ask(config, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(says), answer.text


FAULTS = {
    "damaged": (url("iVBORw0KGgo="), "messages.0.content.0: the image is"),
    "base64": (url("%%%"), "the base64 of an image's data: URL is not valid"),
    "truncated": (url(png()[: len(png()) * 2 // 3 // 4 * 4]), "the image is damaged"),
    "text": ("data:text/plain,hello", "the image is none of PNG, JPEG, WEBP, GIF"),
    "pixels": (url(png(200, 51)), "200 x 51 pixels; 10000 are the most"),
    "file": ("file:///etc/passwd", "an image's URL begins with data:, http: or https:"),
    "server": ("http://127.0.0.1/a.png", "serve.image_domains"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_an_image_that_cannot_be_read_is_a_fault_of_the_request(config: Config, kind: str):
    given, message = FAULTS[kind]
    part = {"type": "image_url", "image_url": {"url": given}}
    answer, seen = ask(config, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400 and seen is None
    said = answer.json()["error"]
    assert message in said["message"] and "\n" not in said["message"] and said["param"] == "messages"


def test_too_many_images_are_refused_before_one_is_decoded(config: Config):
    part = {"type": "image_url", "image_url": {"url": url("aaaa")}}
    for number in (4, 10_000):
        answer, _ = ask(config, CHAT, {"messages": [{"role": "user", "content": [part] * number}]})
        fault = f"a request may have 3 images (serve.max_images), and this has {number}"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, fault)


def test_what_a_prompt_with_images_cannot_have_is_refused(config: Config):
    for more in ({"truncate_prompt_tokens": 4}, {"prompt_logprobs": 1}):
        answer, _ = ask(config, CHAT, bodies(RED)[CHAT] | more)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(more))
    for path, key in ((RESPONSES, "input"), (MESSAGES, "messages")):
        body = bodies(RED)[path]
        answer, _ = ask(config, path, body | {key: [body[key][0] | {"role": "assistant"}]})
        assert answer.status_code == 400 and "does not go with role=assistant" in answer.text


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_chat_has_images_of_any_role_as_in_vllm(config: Config, role: str):
    messages = [bodies(RED)[CHAT]["messages"][0] | {"role": role}, {"role": "user", "content": "And now?"}]
    answer, seen = ask(config, CHAT, {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert spelled(config, seen.prompt).startswith(f"<|im_start|>{role}\n{'<|endoftext|>' * 2}What?<|im_end|>\n")


def test_an_image_of_an_answer_that_is_not_to_be_had_is_a_text(config: Config):
    """A client could not take it out of its history."""
    asked = {"role": "user", "content": "Draw."}
    for own, data in ((config, "aaaa"), (replace(config, serve=replace(config.serve, images=False)), RED)):
        part = {"type": "image_url", "image_url": {"url": url(data)}}
        messages = [asked, {"role": "assistant", "content": [part]}, asked]
        answer, seen = ask(own, CHAT, {"messages": messages})
        assert answer.status_code == 200, answer.text
        assert "assistant\n[image: not shown to this model]<|im_end|>" in spelled(config, seen.prompt)


def test_a_template_that_leaves_an_image_out_is_a_fault(config: Config):
    answer, _ = scripted.post(config, Said(["Hi"]), {"model": "m"} | bodies(RED)[CHAT], CHAT)
    assert answer.status_code == 400
    assert (
        "the model's chat template leaves out images: set serve.http.chat_template" in answer.json()["error"]["message"]
    )


def test_cache_control_of_a_prompt_with_images_keeps_all_of_it(config: Config):
    body = bodies(RED)[MESSAGES]
    body["messages"][0]["content"][1]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    _, seen = ask(config, MESSAGES, body | {"explain": True})
    (kept,) = seen.options.retained
    assert (kept.num_tokens, kept.seconds) == (len(seen.prompt), 3600.0)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_no_image_is_read_once_nobody_waits_for_it(config: Config, path: str, monkeypatch: pytest.MonkeyPatch):
    read, found = ImageReader.read_url, []

    def read_slowly(reader: ImageReader, url: str, detail: str | None = None) -> Any:
        found.append(url)
        time.sleep(0.3)
        return read(reader, url, detail)

    def hurry(context: Any) -> None:
        context.prepare_seconds = 0.1

    monkeypatch.setattr(ImageReader, "read_url", read_slowly)
    answer, _ = scripted.post(config, Said(["Hi"]), {"model": "m"} | bodies(RED, BLUE)[path], path, before=hurry)
    assert answer.status_code == 400 and "took more than 0.1 s" in answer.text
    time.sleep(0.6)
    assert len(found) == 1


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_request_that_no_thread_takes_before_the_end_is_to_be_tried_again(config: Config, path: str):
    def end(context: Any) -> None:
        occupied = [context.shared.image_threads.submit(time.sleep, 0.5) for _ in range(50)]
        asyncio.get_running_loop().call_later(0.2, context.shared.close)
        assert occupied

    answer, _ = scripted.post(config, Said(["Hi"]), {"model": "m"} | bodies(RED)[path], path, before=end)
    assert answer.status_code == 503 and "the server ends before this request has been prepared" in answer.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_request_that_comes_after_the_threads_end_is_to_be_tried_again(config: Config, path: str):
    body = {"model": "m"} | bodies(RED)[path]
    answer, _ = scripted.post(config, Said(["Hi"]), body, path, before=lambda context: context.shared.close())
    assert answer.status_code == 503 and "the server ends before this request has been prepared" in answer.text


def test_texts_are_prepared_while_images_are_decoded(config: Config):
    """More requests with images than there are threads for texts."""
    goes_on, waiting = threading.Event(), []
    reader: Any = SimpleNamespace(read_url=lambda url, detail: goes_on.wait(30))
    given = GivenImage(url(RED), None, "messages", "messages.0.content.0", "image_url", "text")

    def occupy(context: Any) -> None:
        read = partial(PromptImages(reader, 1, limit=1).read, given)
        waiting.extend(asyncio.ensure_future(context.in_thread(read)) for _ in range(NUM_THREADS + 2))

    def say(submit: Any) -> Any:
        goes_on.set()
        return scripted.answers(Said(["Hi"]), submit)

    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    answer, seen = scripted.post(config, say, body, CHAT, before=occupy)
    assert answer.status_code == 200 and len(seen) == 1
