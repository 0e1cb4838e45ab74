"""The page of `job=explain`, in a real browser."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, launch
from playwright.sync_api import Browser, Page, sync_playwright

from atom.cli import main

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = rgb => { const [r, g, b] = rgb.slice(0, 3).map(each => each / 255).map(
    each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = element => { for (; element; element = element.parentElement) {
    const color = rgba(getComputedStyle(element).backgroundColor); if (color[3] === 255) return color; } };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(walker.currentNode.data);
  }
  return faint;
}"""  # text with less contrast than WCAG 2's AA asks for: 4.5


@pytest.fixture(scope="module")  # playwright runs an event loop in this thread, which other modules want to do too
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield launch(playwright)


@pytest.fixture(scope="module")
def path(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a hybrid model with experts, on a GPU that is not here."""
    given = (f"checkpoint={checkpoints('qwen3_next')}", "level=1", "job.gpu=h200", "device=cuda", "job.output=html")
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["job=explain", *given]) == 0
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(out.getvalue())
    return path


def shown_panels(page: Page) -> list[str]:
    texts: list[str] = page.evaluate(
        "() => [...document.querySelectorAll('.panel')].filter(each => each.checkVisibility()).map(each => each.innerText)"
    )
    return texts


def test_it_is_read_on_a_phone_and_a_screen_by_keyboard_without_a_script_or_network(path: Path, browser: Browser):
    for width, scheme in ((390, "light"), (1400, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        asked: list[str] = []
        page.on("request", lambda request, asked=asked: asked.append(request.url))  # type: ignore[misc]
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CONTRAST) == []
        (text,) = shown_panels(page)
        assert "def body(tokens: i64[T]" in text
        page.get_by_label("semantic").focus()
        page.keyboard.press("ArrowRight")  # past the passes that changed nothing
        (text,) = shown_panels(page)
        assert text.startswith("sink_into_head: 1 change,")
        page.keyboard.press("ArrowRight")
        (text,) = shown_panels(page)
        assert text.startswith("fuse_qkv: ") and page.evaluate(CONTRAST) == []
        assert asked == [path.as_uri()]
    assert "<script" not in path.read_text()


def test_the_picture_has_each_kind_of_layer_in_its_place(path: Path, checkpoints: Any, browser: Browser):
    page = browser.new_page()
    page.goto(path.as_uri())
    types = json.loads((checkpoints("qwen3_next") / "config.json").read_text())["layer_types"]
    letters = {"linear_attention": "A", "full_attention": "B"}
    assert page.locator(".strip b").all_inner_texts() == [letters[each] for each in types]
    titles = page.locator(".card h3").all_inner_texts()
    assert titles == [
        "Arecurrent state, 2 of 6 experts",
        "Bfull attention, 2 of 6 experts",
        "before and after the layers",
    ]
    parts = [card.locator("tbody th").all_inner_texts() for card in page.locator(".card").all()]
    for part, own in zip(("linear_attn", "self_attn"), parts, strict=False):
        assert [text.partition("\n")[0] for text in own] == [
            "input_layernorm", part, "post_attention_layernorm", "mlp",
        ]  # fmt: skip


def test_shares_add_up_to_all(path: Path):
    bars = re.findall(r'<div class="bar" role="img" aria-label="([^"]*)"', path.read_text())
    assert len(bars) == 3
    for bar in bars:
        shares = [float(each) for each in re.findall(r" ([\d.]+)%", html.unescape(bar))]
        assert len(shares) > 2 and sum(shares) == pytest.approx(100, abs=0.4)
