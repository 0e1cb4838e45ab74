"""The page, in a real browser against a real server."""

from __future__ import annotations

import base64
import io
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import markdown_it
import PIL.Image
import pytest
from browsing import CHROMIUM, launch
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import Server, Start
from wire import wait_until

SECONDS = 1000  # milliseconds, as playwright counts

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


class Visit(NamedTuple):
    """A page that is open, and what it did."""

    page: Page
    errors: list[str]  # that the console and the window reported
    requests: list[tuple[str, str]]  # method, address

    def send(self, text: str) -> None:
        box = self.page.get_by_role("textbox", name="Message")
        box.fill(text)
        box.press("Enter")

    def set(self, **values: Any) -> None:
        """Settings by their labels."""
        if self.page.get_by_label("System prompt").is_hidden():
            self.page.get_by_role("button", name="Settings").click()
        for name, value in values.items():
            self.page.get_by_label(name.replace("_", " ")).fill(value if isinstance(value, str) else json.dumps(value))

    def show_plots(self) -> None:
        self.page.get_by_role("button", name="Plots").click()

    def figure(self, title: str) -> Any:
        return self.page.locator("figure").filter(has=self.page.get_by_role("heading", name=title))


Open = Callable[..., Visit]  # visit(url, **options of the browser's context)


@pytest.fixture(scope="module")  # playwright runs an event loop in this thread, which other modules want to do too
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=60 * SECONDS)
    with sync_playwright() as playwright:
        yield launch(playwright)


def open_page(browser: Browser, **options: Any) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
    page.set_default_timeout(60 * SECONDS)
    return page


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    """For visits without options of their own: a browser takes longer to make another than to show the page."""
    return open_page(browser)


@pytest.fixture
def visit(browser: Browser, tab: Page) -> Iterator[Open]:
    """Opens a page that no test has seen before. After the test it may have asked nobody but the server."""
    visits: list[tuple[str, Visit, dict[Any, Any]]] = []

    def open(url: str, *, ready: bool = True, **options: Any) -> Visit:
        page = open_page(browser, **options) if options else tab
        visit = Visit(page, [], [])
        heard: dict[Any, Any] = {
            "console": lambda message: visit.errors.append(message.text) if message.type == "error" else None,
            "pageerror": lambda error: visit.errors.append(str(error)),
            "request": lambda request: visit.requests.append((request.method, request.url)),
        }
        visits.append((url, visit, heard))
        for event, hear in heard.items():
            page.on(event, hear)
        if ready:
            page.goto(url)
            expect(page.get_by_role("status")).to_have_text("ready")
        return visit

    yield open
    for url, visit, heard in visits:
        if visit.page is tab:
            for event, hear in heard.items():
                tab.remove_listener(event, hear)
            tab.unroute_all(behavior="ignoreErrors")
            tab.goto("about:blank")
            forgotten = {"origin": url, "storageTypes": "all"}
            tab.context.new_cdp_session(tab).send("Storage.clearDataForOrigin", forgotten)
        else:
            visit.page.context.close()
        assert {address for _, address in visit.requests if not address.startswith(url + "/")} == set()


def complete(server: Server, **body: Any) -> dict[str, Any]:
    """The answer to a chat, without a browser."""
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def read_metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        (found,) = re.findall(rf"^atom:{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found)


def events(*deltas: dict[str, Any]) -> str:
    """A stream as the server sends it."""
    usage = {"prompt_tokens": 7, "completion_tokens": 50, "total_tokens": 57, "ttft_s": 0.25, "tpot_s": 0.02}
    usage |= {"latency_s": 1.25, "prompt_tokens_details": {"cached_tokens": 4}}
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    chunks.append({"choices": [], "usage": usage})
    return ": keep-alive\n\n" + "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"


def answer_with(page: Page, stream: str) -> None:
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))


# Each part of a stream is held back until the page shows the one before it, however slow the browser is.
HOLD_BACK = """() => {
    const {fetch} = window, shown = () => document.querySelector(".assistant > .text")?.textContent.length ?? 0;
    window.fetch = async (address, options) => {
        const answer = await fetch(address, options);
        if (!String(address).endsWith("v1/chat/completions")) return answer;
        const parts = (await answer.text()).match(/(data: [^\\n]*\\n\\n){1,60}/g);
        window.lengths = [];
        const stream = new ReadableStream({async pull(controller) {
            while (shown() <= (window.lengths.at(-1) ?? -1)) await new Promise(requestAnimationFrame);
            window.lengths.push(shown());
            controller.enqueue(new TextEncoder().encode(parts.shift()));
            if (!parts.length) controller.close();
        }}, {highWaterMark: 0});
        return new Response(stream, answer);
    };
}"""


def test_a_chat_streams_and_remembers_what_was_said(server: Server, visit: Open):
    pattern = {"regex": "[a-z ]{240}", "max_tokens": 300}
    first = [{"role": "user", "content": "Who are you?"}]
    expected = complete(server, messages=first, **pattern)
    text = expected["choices"][0]["message"]["content"]
    opened = visit(server.url)
    page = opened.page
    page.evaluate(HOLD_BACK)
    opened.set(Temperature=0, Other_fields=pattern)
    opened.send("Who are you?")
    meta = page.locator(".assistant .meta")
    expect(meta).to_have_text(
        re.compile(r"^TTFT [\d.]+ m?s · [\d.]+ tokens/s · 240 tokens · prompt \d+(, \d+ of them cached)?$")
    )
    assert page.locator(".assistant > .text").text_content() == text and len(text) == 240
    assert f"prompt {expected['usage']['prompt_tokens']}" in (meta.text_content() or "")
    assert len(page.evaluate("window.lengths")) > 3, "it was shown part by part"
    answer_with(page, events({"content": "Yes."}))
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.send("Really?")
    assert asked.value.post_data_json["messages"] == [
        *first,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Really?"},
    ]
    expect(page.locator(".assistant > .text").last).to_have_text("Yes.")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.send("Hello?")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "Hello?"}]
    assert opened.errors == []


def test_an_answer_that_is_stopped_frees_the_engine(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    opened.set(Max_tokens=7000, Other_fields={"ignore_eos": True})
    before = read_metric(server, "generation_tokens_total")
    opened.send("Talk for a long while.")
    expect(page.locator(".assistant > .text")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".assistant .meta")).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert read_metric(server, "generation_tokens_total") - before < 7000, "it was over by itself"
    end = time.monotonic() + 60
    while read_metric(server, "num_requests_running") or read_metric(server, "kv_cache_blocks_used"):
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.1)
    assert opened.errors == []


def test_settings_are_the_fields_of_the_request(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    answer_with(page, events({"content": "yes"}))
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.send("One\nline and another")
    base = {"model": "talker", "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    question = {"role": "user", "content": "One\nline and another"}
    assert asked.value.post_data_json == {**base, "messages": [question]}, "empty ones are the server's to choose"
    page.get_by_role("button", name="New chat").click()
    opened.set(System_prompt="Be brief.", Temperature=0.5, Top_p=0.9, Top_k=40, Max_tokens=9, Seed=-3)
    opened.set(
        Stop_strings="END\n\\n\\n", Other_fields={"min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}}
    )
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.send("Again")
    assert asked.value.post_data_json == {
        **base,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 9,
        "seed": -3,
        "stop": ["END", "\n\n"],
        "min_p": 0.1,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Again"}],
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("more", ["{min_p: 1}", "[1]", '{"n": 2}'])
def test_fields_that_cannot_be_sent_are_not(more: str, server: Server, visit: Open):
    opened = visit(server.url)
    opened.set(Other_fields=more)
    opened.page.get_by_role("button", name="Settings").click()
    opened.send("Hello")
    expect(opened.page.get_by_label("Other fields")).to_be_focused()
    assert "POST" not in {method for method, _ in opened.requests}


def test_a_refusal_is_shown_and_the_message_comes_back(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    opened.set(Temperature=-1)
    opened.send("Hello")
    expect(page.get_by_role("alert")).to_have_text(re.compile(r"^temperature: .* \(400\)$"))
    box = page.get_by_role("textbox", name="Message")
    expect(box).to_have_value("Hello")
    opened.set(Temperature=0, Max_tokens=3)
    with page.expect_request("**/v1/chat/completions") as asked:
        box.press("Enter")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "Hello"}], "it was not answered"
    expect(page.locator(".assistant .meta").last).to_contain_text("3 tokens · cut at the limit")


def test_a_stream_that_breaks_off_is_shown_as_such(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    whole = events({"content": "as far as it "}, {"content": "came"})
    answer_with(page, whole[: whole.index("came") + 60])
    opened.send("Hello")
    expect(page.get_by_role("alert")).to_have_text("The connection ended before the answer did.")
    expect(page.locator(".assistant > .text")).to_have_text("as far as it came")
    page.unroute("**/v1/chat/completions")
    answer_with(page, 'data: {"error": {"message": "the engine was silent for 4 s"}}\n\n')
    opened.send("Hello")
    expect(page.get_by_role("alert").last).to_have_text("the engine was silent for 4 s")
    assert opened.errors == []


def test_text_stays_text_with_its_code_reasoning_and_calls(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"in":'}}
    stream = events(
        {"role": "assistant", "content": ""},
        {"reasoning_content": f"Hm {evil}"},
        {"content": f"{evil} uses `a"},
        {"content": " < b`:\n```python\nif a < b:\n    "},
        {"content": "pass\n```\nso **there** ```"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Bonn"}'}}]},
    )
    answer_with(page, stream)
    opened.send(evil)
    article = page.locator(".assistant")
    expect(article.locator(".meta")).to_have_text(
        "TTFT 250 ms · 50 tokens/s · 50 tokens · cut at the limit · prompt 7, 4 of them cached"
    )
    expect(article.locator("> .text > p")).to_have_text([f"{evil} uses a < b:", "so there ```"])
    assert article.locator("> .text > p > code").all_text_contents() == ["a < b"]
    assert article.locator("pre code").all_text_contents() == ["if a < b:\n    pass"]
    expect(article.locator(".call")).to_have_text('weather({"in": "Bonn"})')
    expect(article.get_by_text("Hm <img")).to_have_count(0)
    article.get_by_text("Reasoning").click()
    expect(article.get_by_text("Hm <img")).to_be_visible()
    assert page.locator(".user > .text").text_content() == evil
    assert page.locator("#log :is(img, script)").count() == 0
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.send("15 degrees")
    whole = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Bonn"}'}}
    assert asked.value.post_data_json["messages"][1]["tool_calls"] == [whole]
    assert opened.errors == []


@pytest.mark.slow
def test_shift_enter_begins_a_line_and_nothing_but_space_is_not_sent(server: Server, visit: Open):
    opened = visit(server.url)
    box = opened.page.get_by_role("textbox", name="Message")
    expect(box).to_be_focused()
    opened.page.keyboard.press("Shift+Enter")
    opened.page.keyboard.press("Enter")
    expect(box).to_have_value("\n")
    expect(opened.page.get_by_role("article")).to_have_count(0)


def accented(page: Page) -> dict[str, int]:
    """By chart the pixels that have the accent's colour, which only lines have."""
    return page.evaluate("""() => {
        const style = getComputedStyle(document.documentElement).getPropertyValue("--accent");
        const accent = style.match(/[0-9a-f]{2}/g).map(part => parseInt(part, 16));
        return Object.fromEntries([...document.querySelectorAll("figure")].map(figure => {
            const canvas = figure.querySelector("canvas");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let number = 0;
            for (let i = 0; i < data.length; i += 4)
                number += data[i + 3] === 255 && accent.every((part, which) => data[i + which] === part);
            return [figure.querySelector("h2").firstChild.textContent, number];
        }));
    }""")


@pytest.mark.slow
def test_plots_draw_what_the_server_does(server: Server, visit: Open):
    opened = visit(server.url)
    opened.show_plots()
    opened.set(Max_tokens=7000, Other_fields={"ignore_eos": True})
    latencies, measured = (
        ("Time to first token", "Inter-token latency", "Queue time"),
        re.compile(r"mean \d.* p95 [\d–]"),
    )
    assert {accented(opened.page)[title] for title in latencies} == {0}, "there is nothing to measure yet"
    opened.send("Talk.")
    expect(opened.figure("Requests")).to_contain_text("running 1")
    expect(opened.figure("KV")).to_contain_text(re.compile(r"used [1-9]\d* of \d+ \([\d.]+ %\)"))
    expect(opened.figure("Time to first token")).to_contain_text(measured)
    expect(opened.figure("Inter-token latency")).to_contain_text(measured)
    expect(opened.figure("Generated")).to_contain_text(re.compile(r"rate [1-9]"))
    wait_until(lambda: accented(opened.page)["Inter-token latency"])  # two looks at the metrics make a line
    opened.page.get_by_role("button", name="Stop").click()
    opened.set(Max_tokens=2)
    opened.send("And briefly?")
    expect(opened.figure("Queue time")).to_contain_text(measured)
    drawn = accented(opened.page)
    assert all(drawn.values()), "the second turn found the first one's prefix"
    assert len(drawn) == 8
    assert opened.errors == []


def metrics(num: int, total: float, under: int) -> str:
    """A histogram of `num` requests: `under` of them below 100 ms, the others below 250 ms; and hits."""
    name = "atom:time_to_first_token_seconds"
    counts = {"0.1": under, "0.25": num, "+Inf": num}
    lines = [f'{name}_bucket{{le="{bound}"}} {count}.0' for bound, count in counts.items()]
    lines += [f"{name}_count {num}.0", f"{name}_sum {total}"]
    lines += [f"atom:prefix_cache_queries_total {100 * num}.0", f"atom:prefix_cache_hits_total {40 * num}.0"]
    return "# HELP of something\n" + "\n".join(lines) + "\n"


def test_latencies_are_those_between_two_looks(server: Server, visit: Open):
    opened = visit(server.url, ready=False)
    texts = [metrics(1000, 5000.0, 0)]
    opened.page.route("**/metrics", lambda route: route.fulfill(body=texts[-1], content_type="text/plain"))
    with opened.page.expect_response("**/metrics"):
        opened.page.goto(server.url)
    opened.show_plots()
    texts.append(metrics(1020, 5003.0, 10))  # 20 in 3 s; the 19th is the 9th of the 10 between 100 and 250 ms
    expect(opened.figure("Time to first token")).to_contain_text("mean 150 ms p95 235 ms")
    expect(opened.figure("Prefix hits")).to_contain_text("hits 40 %")


@pytest.mark.slow
def test_a_few_samples_have_no_95th_percentile(server: Server, visit: Open):
    opened = visit(server.url, ready=False)
    texts = [metrics(1000, 5000.0, 0)]
    opened.page.route("**/metrics", lambda route: route.fulfill(body=texts[-1], content_type="text/plain"))
    with opened.page.expect_response("**/metrics"):
        opened.page.goto(server.url)
    opened.show_plots()
    texts.append(metrics(1001, 5000.15, 0))
    expect(opened.figure("Time to first token")).to_contain_text("mean 150 ms p95 –")


@pytest.mark.slow
def test_an_answer_without_times_shows_none(server: Server, visit: Open):
    opened = visit(server.url)
    stream = events({"content": "yes"}).replace('"ttft_s": 0.25, "tpot_s": 0.02, ', "")
    answer_with(opened.page, stream)
    opened.send("Hello")
    expect(opened.page.locator(".assistant .meta").last).to_have_text(
        "50 tokens · cut at the limit · prompt 7, 4 of them cached"
    )


@pytest.mark.slow
def test_a_table_breaks_no_number_and_no_word(server: Server, visit: Open):
    opened = visit(server.url)
    opened.page.set_viewport_size({"width": 400, "height": 800})
    cells = ["1,000", "throughput", "12,345,678", "interactivity", "1,234.5"] * 2
    rows = [cells, ["---"] * len(cells), cells]
    answer_with(opened.page, events({"content": "".join(f"|{'|'.join(row)}|\n" for row in rows)}))
    opened.send("Hello")
    number = opened.page.locator(".assistant td").first
    expect(number).to_have_text("1,000")
    heights = opened.page.locator(".assistant td").evaluate_all("all => all.map(each => each.clientHeight)")
    assert max(heights) < 2 * 22, "a line each"
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 400
    opened.page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_the_state_is_that_of_health(state: str, server: Server, visit: Open):
    opened = visit(server.url, ready=False)
    body = json.dumps({"status": state, "state": state})
    opened.page.route("**/health", lambda route: route.fulfill(status=503, body=body))
    opened.page.goto(server.url)
    expect(opened.page.get_by_role("status")).to_have_text(state)


def test_a_key_that_is_no_longer_valid_is_reported_and_not_asked_for_each_second(server: Server, visit: Open):
    opened = visit(server.url)
    opened.page.route("**/metrics", lambda route: route.fulfill(status=401))
    expect(opened.page.get_by_role("status")).to_have_text("key refused: reload the page")
    num_requests = len(opened.requests)
    opened.page.wait_for_timeout(1.5 * SECONDS)
    assert len(opened.requests) == num_requests


@pytest.mark.slow
def test_with_a_key_as_password_all_works_until_the_server_is_gone(start_server: Start, visit: Open):
    server = start_server("serve.http.api_keys=sesame", stub={})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(server.url)
    opened = visit(server.url, http_credentials={"username": "me", "password": "sesame"})
    opened.set(Max_tokens=4)
    opened.send("Hello")
    expect(opened.page.locator(".assistant .meta")).to_contain_text("4 tokens")
    assert opened.errors == []
    server.process.kill()
    expect(opened.page.get_by_role("status")).to_have_text("unreachable")
    opened.send("Hello?")
    expect(opened.page.get_by_role("alert")).to_have_text("The server cannot be reached.")


def test_the_policy_forbids_what_is_not_the_pages_own(server: Server, visit: Open):
    opened = visit(server.url)
    assert opened.page.evaluate("fetch('https://example.org/').then(() => 'sent', error => error.name)") == "TypeError"
    html = "() => { try { document.body.innerHTML = '<p>'; return 'made'; } catch (error) { return error.name; } }"
    assert opened.page.evaluate(html) == "TypeError"
    violated = opened.page.evaluate("""() => new Promise(resolve => {
        document.addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
        document.body.append(Object.assign(document.createElement("img"), {src: "/health"}));
    })""")
    assert violated == "img-src"
    policy = "name => { try { return trustedTypes.createPolicy(name, {createHTML: it => it}).name; } catch (error) { return error.name; } }"
    assert opened.page.evaluate(policy, "other") == "TypeError", "only DOMPurify's policy makes HTML"


@pytest.mark.slow
def test_a_phone_shows_one_part_at_a_time(server: Server, visit: Open):
    opened = visit(server.url, color_scheme="dark")
    page = opened.page
    page.set_viewport_size({"width": 400, "height": 800})
    chat, plots = page.get_by_role("region", name="Chat"), page.get_by_role("region", name="Plots")
    chats = page.get_by_role("navigation", name="Chats")
    for name, shown, hidden in (("Plots", plots, chat), ("Chats", chats, plots), ("Chat", chat, chats)):
        page.get_by_role("group", name="View").get_by_role("button", name=name, exact=True).click()
        expect(shown).to_be_visible()
        expect(hidden).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
    opened.set(Temperature=1)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()


RENDER = """async text => {
    const {renderMarkdown} = await import("/page/markdown.js");
    const target = document.createElement("div");
    const started = performance.now();
    renderMarkdown(target, text);
    for (const each of target.querySelectorAll(".head")) each.remove();
    for (const each of target.querySelectorAll("*"))
        for (const {name} of [...each.attributes]) if (!["href", "start"].includes(name)) each.removeAttribute(name);
    return {html: target.innerHTML, seconds: (performance.now() - started) / 1000,
            depth: Math.max(0, ...[...target.querySelectorAll("*")].map(each => {
                let depth = 0;
                for (let at = each; at !== target; at = at.parentNode) depth++;
                return depth;
            }))};
}"""


@pytest.fixture(scope="module")
def render(browser: Browser, server: Server) -> Callable[[str], dict[str, Any]]:
    """Renders Markdown in the page, under its policy: the HTML without what only styles it, seconds, and its depth."""
    page = browser.new_page()
    page.goto(server.url)
    return lambda text: page.evaluate(RENDER, text)


def test_markdown_is_what_commonmark_says(render: Callable[[str], dict[str, Any]]):
    texts = [
        "# A *heading* #\n\nText with **bold**, *em*, ***both***, __bold__, snake_case_name and ~~gone~~.\nNext line.",
        "* a\n* b\n\nbehind\n\n7. seven\n8. eight `x * y * z`\n   - deeper **y**\n     - deepest\n9. nine",
        "- loose\n\n- items\n\n  with more\n- ```py\n  code()\n\n  more()\n  ```",
        "> quoted **text**\n>\n> - list\n\n***\n\n````\n```\ninner\n```\n````\nno blank line",
        "| a | b |\n|:--|---:|\n| 1 | `2` |\n| x \\| y |\n\ntext | no table",
        '[one](https://a.org/x_(y)?a=1 "Title"), [*two*](<http://b.org/>) and <https://c.org>. \\*plain\\* [no] (link)',
        "`` a ` b `` and ` c ` but `open\n\n2 * 3 * 4, a*b*c, **open and *closed*\nhard  \nbreak\\\nthere",
        "~~~js title\nlet a = `b`;\n~~~\n<b>html</b> &amp; ![alt](https://x.org/i.png)",
    ]
    parser = markdown_it.MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    for text in texts:
        assert plain_html(render(text)["html"]) == plain_html(parser.render(text)), text


def plain_html(html: str) -> str:
    """HTML with nothing that is shown alike: wrappers, attributes of style, images as links, spaces between blocks."""
    html = re.sub(r'<img src="([^"]*)" alt="([^"]*)"[^>]*>', r'<a href="\1">\2</a>', html)
    html = re.sub(r'</?div>| (?:class|style|title)="[^"]*"', "", html).replace("<s>", "<del>").replace("</s>", "</del>")
    html = html.replace("&quot;", '"').replace("<br />", "<br>").replace("<hr />", "<hr>")
    html = html.replace("<tbody></tbody>", "").replace("\n</code>", "</code>").replace("&amp;amp;", "&amp;")
    return re.sub(
        r"\s+", " ", re.sub(r"\s*(</?(?:p|h\d|ul|ol|li|pre|blockquote|hr|br|table|t\w+)\b[^>]*>)\s*", r"\1", html)
    ).strip()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text",
    [
        "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x) <javascript:alert(1)>",
        "[a](\tjavascript:alert(1)) [b](java\nscript:alert(1)) [c](//evil.org) [d](/stop_profile) ![e](file:///etc/passwd)",
        "<script>alert(1)</script>\n\n<img src=x onerror=alert(1)>\n\n<style>*{display:none}</style>\n\n<iframe src=/>",
        "```<script>\n</code></pre><script>alert(1)</script>",
    ],
)  # fmt: skip
def test_hostile_markdown_stays_text(text: str, render: Callable[[str], dict[str, Any]]):
    html = render(text)["html"]
    assert set(re.findall(r"<(\w+)", html)) <= {"p", "br", "div", "pre", "code"}, html
    shown = re.sub(r"\W", "", re.sub(r"<[^>]*>|&\w+;", "", html))
    assert "alert1" in shown or "evil" in shown


@pytest.mark.slow
def test_a_picture_in_a_link_is_its_text_and_references_stay_text(render: Callable[[str], dict[str, Any]]):
    html = render("[![build](https://x.org/badge.svg)](https://x.org) [a][b]\n\n[b]: https://evil.org/")["html"]
    assert html == (
        '<p><a href="https://x.org">build</a> [a][b]</p><p>[b]: <a href="https://evil.org/">https://evil.org/</a></p>'
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("html", "left"),
    [
        ("<p>a<script>alert(1)</script><style>p{}</style>b</p>", "<p>ab</p>"),
        ('<p><img src="https://x.org/i.png" onerror="alert(1)">a</p>', "<p>a</p>"),
        ('<a href="javascript:alert(1)">a</a><a href="data:text/html,x">b</a><a href="//x.org">c</a>', "<a>a</a><a>b</a><a>c</a>"),
        ('<a href="https://x.org" onclick="alert(1)" style="color:red" id="log" name="body">a</a>', '<a href="https://x.org">a</a>'),
        ('<iframe src="/"></iframe><form action="/stop_profile"><button>a</button></form><object data="/"></object>', "a"),
        ("<svg><p><style><a id='</style><img src=x onerror=alert(1)>'></style></svg>b", "<p>'&gt;b</p>"),
        ('<math><mtext><table><mglyph><style><img src=x onerror="alert(1)"></style></mglyph></table></mtext></math>', ""),
        ('<input type="checkbox" checked disabled><ol start="3"><li>a</li></ol><td align="right">b', '<input type="checkbox" checked="" disabled=""><ol start="3"><li>a</li></ol>b'),
    ],
)  # fmt: skip
def test_the_sanitizer_leaves_what_markdown_makes_and_nothing_else(html: str, left: str, server: Server, visit: Open):
    found = visit(server.url).page.evaluate(
        """async html => {
        const {sanitize} = await import("/page/markdown.js");
        const target = document.createElement("div");
        target.append(sanitize(html));
        return target.innerHTML;
    }""",
        html,
    )
    assert found == left


@pytest.mark.slow
def test_tables_are_aligned_and_tasks_are_boxes_that_cannot_be_ticked(server: Server, visit: Open):
    opened = visit(server.url)
    text = "| a | b | c |\n|---|--:|:-:|\n| 1 | 2 | 3 |\n\n- [ ] open\n- [x] done\n\n7. seven"
    answer_with(opened.page, events({"content": text}))
    opened.send("Hello")
    cells = opened.page.locator(".assistant td")
    expect(cells).to_have_text(["1", "2", "3"])
    sides = cells.evaluate_all("all => all.map(each => getComputedStyle(each).textAlign)")
    assert sides == ["left", "right", "center"]
    boxes = opened.page.locator(".assistant li > input")
    assert boxes.evaluate_all("all => all.map(each => [each.type, each.checked, each.disabled])") == [
        ["checkbox", False, True],
        ["checkbox", True, True],
    ]
    expect(opened.page.locator(".assistant ol")).to_have_attribute("start", "7")


@pytest.mark.slow
def test_an_item_of_a_list_shows_its_line_breaks_and_no_empty_lines(server: Server, visit: Open):
    opened = visit(server.url)
    answer_with(opened.page, events({"content": "- one\n- two\n  - inner\n- three\n  lines\n\nend"}))
    opened.send("Hello")
    items = opened.page.locator(".assistant .text > ul > li")
    expect(items).to_have_text(["one", re.compile("^two"), re.compile("^three")])
    one, two, three = items.evaluate_all("all => all.map(each => each.clientHeight)")
    assert (round(two / one), round(three / one)) == (2, 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "piece",
    ["*", "**a ", "[", "[a](", "![", "`", "`a``", "> ", "- ", "1. ", "# ", "_a*b~~", "|-", "<http:", "\\", " \t", "a\n- b\n  ", "~~~\n", "("],
)  # fmt: skip
def test_huge_markdown_takes_no_time_and_no_depth(piece: str, render: Callable[[str], dict[str, Any]]):
    for length in (60_000, 300_000):
        result = render((piece * length)[:length])
        assert result["seconds"] < 30 and result["depth"] < 60


def test_markdown_that_grows_keeps_what_is_there(server: Server, visit: Open):
    text = "Intro\n\n```py\nfor x in y:\n    pass\n```\n\n- a\n- **b**\n\n| a |\n|---|\n| 1 |\n\nEnd"
    same = visit(server.url).page.evaluate(
        """async text => {
        const {renderMarkdown} = await import("/page/markdown.js");
        const [grown, whole] = [document.createElement("div"), document.createElement("div")];
        let first = null, button = null;
        for (let end = 1; end <= text.length; end++) {
            renderMarkdown(grown, text.slice(0, end));
            if (end === 8) first = grown.firstChild;
            if (end === 20) button = grown.querySelector("button");
        }
        renderMarkdown(whole, text);
        return [grown.innerHTML === whole.innerHTML, first === grown.firstChild, button === grown.querySelector("button")];
    }""",
        text,
    )
    assert same == [True, True, True]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "text",
    [
        "1. a\n\n2. b\n\nText\n\n3. c\n10) d",
        "- a\n\n  more\n\n      code\n\n- b\n* c\n\n---\n- d",
        "Title\n===\n\na | b\n--|--\n1 | 2\n\n> q\n> - l\nlazy\n\n> r",
        "~~~\na\n\n```\n\nb\n~~~\n\n**open\n\n# h\nText\n- i\n\n\n\n+ j\n<div>\n\n</div>\r\nz",
    ],
)
def test_markdown_that_grows_is_shown_as_the_whole_is(text: str, server: Server, visit: Open):
    different = visit(server.url).page.evaluate(
        """async text => {
        const {renderMarkdown} = await import("/page/markdown.js");
        const grown = document.createElement("div"), different = [];
        for (let end = 1; end <= text.length; end++) {
            const whole = document.createElement("div");
            renderMarkdown(grown, text.slice(0, end));
            renderMarkdown(whole, text.slice(0, end));
            if (grown.innerHTML !== whole.innerHTML) different.push([text.slice(0, end), grown.innerHTML, whole.innerHTML]);
        }
        return different;
    }""",
        text,
    )
    assert different == []


def test_what_is_finished_is_neither_parsed_nor_built_again(server: Server, visit: Open):
    text = "A *paragraph* of some words.\n\n- item\n- item\n\n```py\ncode()\n```\n\n" * 100
    parsed, built = visit(server.url).page.evaluate(
        """async text => {
        const {renderMarkdown} = await import("/page/markdown.js");
        const {Lexer} = await import("/page/vendor/marked.esm.js");
        const target = document.createElement("div"), {lex} = Lexer.prototype;
        let parsed = 0, built = 0;
        Lexer.prototype.lex = function (source) { parsed += source.length; return lex.call(this, source); };
        const observer = new MutationObserver(() => {});
        observer.observe(target, {childList: true});
        for (let end = 10; end <= text.length; end += 10) renderMarkdown(target, text.slice(0, end));
        for (const {addedNodes} of observer.takeRecords()) built += addedNodes.length;
        Lexer.prototype.lex = lex;
        return [parsed / text.length, built / target.childNodes.length];
    }""",
        text,
    )
    assert 1 < parsed < 30, "times that a character is parsed, of 700 steps"
    assert 1 < built < 10, "times that a block is built"


def test_the_histograms_of_several_models_are_added_up(server: Server, visit: Open):
    buckets = {"a": (1, 4), "b": (2, 2)}
    lines = [
        f'atom:wait_bucket{{le="{bound}",model_name="{name}"}} {count}.0'
        for name, counts in buckets.items()
        for bound, count in zip(("0.5", "+Inf"), counts, strict=True)
    ]
    found = visit(server.url).page.evaluate(
        """async text => {
        const {parseMetrics} = await import("/page/metrics.js");
        return parseMetrics(text).buckets.get("wait_bucket");
    }""",
        "\n".join(lines),
    )
    assert found == [[0.5, 3], [float("inf"), 6]]


@pytest.mark.slow
def test_code_is_copied(server: Server, visit: Open):
    opened = visit(server.url, permissions=["clipboard-read", "clipboard-write"])
    answer_with(opened.page, events({"content": "See:\n```py\na = 1\nb = 2\n```"}))
    opened.send("Code, please")
    opened.page.locator(".code").get_by_role("button", name="Copy").click()
    expect(opened.page.locator(".code").get_by_role("button", name="Copied")).to_be_visible()
    assert opened.page.evaluate("navigator.clipboard.readText()") == "a = 1\nb = 2"
    opened.page.get_by_role("group", name="Answer").get_by_role("button", name="Copy").click()
    expect(opened.page.get_by_role("group", name="Answer").get_by_role("button", name="Copied")).to_be_visible()
    assert opened.page.evaluate("navigator.clipboard.readText()") == "See:\n```py\na = 1\nb = 2\n```"


@pytest.mark.slow
def test_chats_are_kept_listed_exported_and_deleted(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    chats = page.get_by_role("navigation", name="Chats")
    for question, answer in (("First one", "Answer *1*"), ("Second <b>", "Answer 2")):
        answer_with(page, events({"content": answer}))
        opened.send(question)
        expect(page.locator(".assistant .meta")).to_contain_text("TTFT")
        chats.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("article")).to_have_count(0)
    page.reload()
    expect(chats.get_by_role("listitem")).to_have_text(["Second <b>×", "First one×"])
    chats.get_by_role("button", name="First one", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.locator(".assistant em")).to_have_text("1")
    expect(chats.locator("[aria-current]")).to_have_text("First one")
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.send("More")
    assert [each["content"] for each in asked.value.post_data_json["messages"]] == ["First one", "Answer *1*", "More"]
    expect(page.get_by_role("article")).to_have_count(4)
    expect(page.locator(".assistant .meta").last).to_contain_text("TTFT")
    expect(chats.get_by_role("listitem")).to_have_text(["First one×", "Second <b>×"])
    with page.expect_download() as saved:
        chats.get_by_role("button", name="Export chat").click()
    assert saved.value.suggested_filename == "First-one.md"
    assert "# First one\n\n## You\n\nFirst one\n\n## talker\n\nAnswer *1*\n" in saved.value.path().read_text()
    with page.expect_download() as saved:
        chats.get_by_role("button", name="Export all").click()
    assert [each["title"] for each in json.loads(saved.value.path().read_text())] == ["First one", "Second <b>"]
    page.once("dialog", lambda dialog: dialog.accept())
    chats.get_by_role("button", name="Delete First one").click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.reload()
    expect(chats.get_by_role("listitem")).to_have_text(["Second <b>×"])
    assert opened.errors == []


def test_messages_are_edited_and_answers_made_anew_and_continued(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page

    def asked_by(act: Callable[[], None], *deltas: dict[str, Any]) -> dict[str, Any]:
        page.unroute("**/v1/chat/completions")
        answer_with(page, events(*deltas))
        with page.expect_request("**/v1/chat/completions") as asked:
            act()
        expect(page.locator(".assistant .meta").last).to_contain_text("TTFT")
        return asked.value.post_data_json

    asked_by(lambda: opened.send("One"), {"content": "half an"})
    request = asked_by(page.get_by_role("button", name="Continue").click, {"content": " answer"})
    assert request["messages"][-1] == {"role": "assistant", "content": "half an"}
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
    expect(page.locator(".assistant > .text")).to_have_text("half an answer")
    request = asked_by(page.get_by_role("button", name="Regenerate").click, {"content": "another"})
    assert request["messages"] == [{"role": "user", "content": "One"}] and "continue_final_message" not in request
    expect(page.locator(".assistant > .text")).to_have_text("another")
    asked_by(lambda: opened.send("Two"), {"content": "second"})
    page.get_by_role("button", name="Edit").first.click()
    box = page.get_by_role("textbox", name="Edit message")
    expect(box).to_be_focused()
    box.press("Escape")
    expect(page.get_by_role("article")).to_have_count(4)
    page.get_by_role("button", name="Edit").first.click()
    box.fill("Uno")
    request = asked_by(lambda: box.press("Enter"), {"content": "first"})
    assert request["messages"] == [{"role": "user", "content": "Uno"}]
    expect(page.get_by_role("article")).to_have_count(2)
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body="busy"))
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert").last).to_have_text("busy (503)")
    expect(page.locator(".assistant > .text")).to_have_text("first")


def test_a_continued_answer_goes_on_where_it_was_cut(server: Server, visit: Open):
    opened = visit(server.url)
    opened.set(Max_tokens=5, Temperature=0, Other_fields={"regex": "[a-z]{5,10}"})
    opened.send("Hello")
    text = opened.page.locator(".assistant > .text")
    expect(text).to_have_text(re.compile(r"^[a-z]{5}$"))
    first = text.text_content() or ""
    opened.page.get_by_role("button", name="Continue").click()
    expect(text).to_have_text(re.compile(rf"^{first}[a-z]{{5}}$"))


@pytest.mark.slow
def test_settings_and_folded_plots_are_kept(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    opened.set(System_prompt="Be brief.", Temperature=0.5)
    views, plots = page.get_by_role("group", name="View"), page.get_by_role("region", name="Plots")
    for is_shown in (False, True, False):  # the chat comes first
        (expect(plots).to_be_visible if is_shown else expect(plots).to_be_hidden)()
        page.reload()
        expect(page.get_by_role("status")).to_have_text("ready")
        (expect(plots).to_be_visible if is_shown else expect(plots).to_be_hidden)()
        expect(views.get_by_role("button", name="Plots")).to_have_attribute("aria-pressed", str(is_shown).lower())
        views.get_by_role("button", name="Plots").click()
    views.get_by_role("button", name="Plots").click()
    answer_with(page, events({"content": "yes"}))
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Compare TCP and UDP in a table.").click()
    body = asked.value.post_data_json
    assert (body["temperature"], body["messages"][0]["content"]) == (0.5, "Be brief.")
    assert body["messages"][1] == {"role": "user", "content": "Compare TCP and UDP in a table."}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Defaults").click()
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("")
    expect(page.get_by_label("Max tokens")).to_have_value("")


def image_file(format: str, width: int = 4, height: int = 4) -> dict[str, Any]:
    """A red file as playwright chooses it."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (255, 0, 0)).save(file, format)
    return {"name": f"red.{format.lower()}", "mimeType": f"image/{format.lower()}", "buffer": file.getvalue()}


HAND_OVER = """([target, kind, name, type, data]) => {  // a file by the clipboard or by the mouse
    const bytes = Uint8Array.from(atob(data), sign => sign.charCodeAt(0)), held = new DataTransfer();
    held.items.add(new File([bytes], name, {type}));
    const [Made, field] = kind === "paste" ? [ClipboardEvent, "clipboardData"] : [DragEvent, "dataTransfer"];
    const event = new Made(kind, {[field]: held, bubbles: true, cancelable: true});
    document.querySelector(target).dispatchEvent(event);
    return event.defaultPrevented;
}"""


def hand_over(page: Page, target: str, kind: str, file: dict[str, Any]) -> None:
    data = base64.b64encode(file["buffer"]).decode()
    assert page.evaluate(HAND_OVER, [target, kind, file["name"], file["mimeType"], data]), (
        "the browser does nothing else"
    )


def test_images_are_chosen_pasted_and_dropped_and_sent_before_the_text(server: Server, visit: Open):
    opened = visit(server.url, ready=False)
    page = opened.page
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        models = json.loads(answer.read())
    models["data"][0]["architecture"]["input_modalities"].append("image")
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.goto(server.url)
    attached = page.get_by_role("list", name="Images of the message").get_by_role("listitem")
    png, bitmap = image_file("PNG"), image_file("BMP", 4000, 4)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Image", exact=True).click()
    chooser.value.set_files([png])
    expect(attached).to_have_count(1)
    hand_over(page, "#message", "paste", bitmap)
    expect(attached).to_have_count(2)
    hand_over(page, "#log", "drop", png)
    expect(attached).to_have_count(3)
    hand_over(page, "#log", "drop", {"name": "a.png", "mimeType": "image/png", "buffer": b"no image"})
    expect(page.get_by_role("alert")).to_have_text("a.png is no image that this browser can read.")
    page.get_by_role("button", name="Remove image 3").click()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, body="no room"))
    opened.send("What is it?")
    expect(page.get_by_role("alert").last).to_have_text("no room (400)")
    expect(attached).to_have_count(2)
    page.unroute("**/v1/chat/completions")
    answer_with(page, events({"content": "Red."}))
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send").click()
    (message,) = asked.value.post_data_json["messages"]
    first, second, text = message["content"]
    url = f"data:image/png;base64,{base64.b64encode(png['buffer']).decode()}"
    assert (first, text) == ({"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"})
    head, _, data = second["image_url"]["url"].partition(",")
    drawn = PIL.Image.open(io.BytesIO(base64.b64decode(data)))
    assert (head, drawn.size) == ("data:image/jpeg;base64", (3072, 3))
    assert all(abs(found - given) < 4 for found, given in zip(drawn.getpixel((9, 1)), (255, 0, 0), strict=True))
    expect(attached).to_have_count(0)
    shown = page.locator(".user img")
    expect(shown).to_have_count(2)
    assert page.evaluate("document.querySelector('.user img').naturalWidth") == 4
    page.get_by_role("button", name="Edit").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("textbox", name="Edit message").fill("Which?")
        page.get_by_role("textbox", name="Edit message").press("Enter")
    (message,) = asked.value.post_data_json["messages"]
    assert message["content"] == [first, second, {"type": "text", "text": "Which?"}]
    assert [each for each in opened.errors if "400" not in each] == []


def test_a_model_of_text_takes_no_images(server: Server, visit: Open):
    page = visit(server.url).page
    expect(page.get_by_role("button", name="Image", exact=True)).to_be_hidden()
    hand_over(page, "#log", "drop", image_file("PNG"))
    expect(page.get_by_role("alert")).to_have_text("talker reads no images.")


@pytest.mark.slow
def test_an_empty_page_has_examples_that_are_sent_as_they_are(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    answer_with(page, events({"content": "Sure."}))
    examples = page.get_by_role("log", name="Conversation").get_by_role("listitem").get_by_role("button")
    expect(examples).to_have_count(4)
    expect(examples.nth(2)).to_have_text("Compare TCP and UDP in a table.")
    for index in range(4):
        text = examples.nth(index).text_content() or ""
        with page.expect_request("**/v1/chat/completions") as asked:
            examples.nth(index).click()
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": text}]
        expect(page.get_by_role("heading", name="Ask something")).to_have_count(0)
        expect(page.locator(".user > .text")).to_have_text(text)
        expect(page.locator(".assistant > .text")).to_have_text("Sure.")
        page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("navigation", name="Chats").get_by_role("listitem")).to_have_count(4)
    assert opened.errors == []


@pytest.mark.slow
def test_tab_and_enter_open_a_chat_edit_a_message_and_make_an_answer_anew(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page

    def tab_to(name: str) -> None:
        """Press Tab as often as it takes to come to the next control of this name."""
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(it => it.ariaLabel || it.textContent)(document.activeElement)") == name:
                return
        raise AssertionError(f"Tab does not come to {name}")

    def asked_by_enter(*deltas: dict[str, Any]) -> list[dict[str, str]]:
        page.unroute("**/v1/chat/completions")
        answer_with(page, events(*deltas))
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        expect(page.locator(".assistant .meta").last).to_contain_text("TTFT")
        return asked.value.post_data_json["messages"]

    tab_to("Compare TCP and UDP in a table.")
    assert asked_by_enter({"content": "| TCP |"})[0]["content"] == "Compare TCP and UDP in a table."
    expect(page.get_by_role("log")).to_be_focused()  # the example is gone, and Tab goes on from there
    tab_to("New chat")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article")).to_have_count(0)
    tab_to("Compare TCP and UDP in a table.")  # of the chats that are kept, which come before the examples
    page.keyboard.press("Enter")
    expect(page.get_by_role("article")).to_have_count(2)
    tab_to("Edit")
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Edit message")).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("Compare them")
    assert asked_by_enter({"content": "No."}) == [{"role": "user", "content": "Compare them"}]
    expect(page.get_by_role("log")).to_be_focused()
    tab_to("Regenerate")
    assert asked_by_enter({"content": "Yes."}) == [{"role": "user", "content": "Compare them"}]
    expect(page.locator(".assistant > .text")).to_have_text("Yes.")
    expect(page.get_by_role("log")).to_be_focused()
    assert opened.errors == []


@pytest.mark.slow
def test_the_pace_is_shown_while_it_streams_and_escape_stops(server: Server, visit: Open):
    opened = visit(server.url)
    opened.set(Max_tokens=7000, Other_fields={"ignore_eos": True})
    opened.send("Talk.")
    expect(opened.page.locator(".assistant .meta")).to_have_text(re.compile(r"^[1-9]\d* tokens · [\d.]+k? tokens/s$"))
    opened.page.keyboard.press("Escape")
    expect(opened.page.locator(".assistant .meta")).to_have_text("stopped")


@pytest.mark.slow
def test_a_screen_reader_gets_whole_answers(server: Server, visit: Open):
    opened = visit(server.url)
    page = opened.page
    answer_with(page, events({"content": "# Title\n\n- item"}))
    opened.send("Hello")
    expect(page.locator("[aria-live=polite]")).to_have_text("# Title\n\n- item", use_inner_text=False)
    tree = page.get_by_role("log", name="Conversation").aria_snapshot()
    for line in (
        'article "You"',
        'article "talker"',
        'heading "Title" [level=1]',
        "listitem: item",
        'button "Regenerate"',
    ):
        assert line in tree, tree
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")  # or each token would be said
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")].filter(
        each => !(each.ariaLabel || each.textContent.trim() || each.labels?.length)).map(each => each.outerHTML)""")
    assert unnamed == []
