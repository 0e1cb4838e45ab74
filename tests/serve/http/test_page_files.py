"""The files of the page: their size, and those that are other projects' releases."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
WEB = ROOT / "atom" / "serve" / "web"
VENDORED = WEB / "vendor"
ROW = re.compile(r"^\| `(.+?)` \| .* \| (\d+) \| `([0-9a-f]{64})` \| .* \| (.+) \|$", re.MULTILINE)


def test_vendored_files_are_the_releases_that_are_listed():
    rows = {name: (int(size), digest) for name, size, digest, _ in ROW.findall((VENDORED / "README.md").read_text())}
    scripts = {path.name: path.read_bytes() for path in VENDORED.glob("*.js")}
    assert rows == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in scripts.items()} and rows


def test_the_notice_of_each_vendored_file_is_there():
    marked, purify = (notice for *_, notice in ROW.findall((VENDORED / "README.md").read_text()))
    assert "`marked.LICENSE`" in marked and "Permission is hereby granted" in (VENDORED / "marked.LICENSE").read_text()
    assert "`LICENSE`" in purify and "Apache License" in (ROOT / "LICENSE").read_text()
    assert "Released under the Apache license 2.0" in (VENDORED / "purify.min.js").read_text("utf-8").splitlines()[0]


def test_the_whole_page_is_below_155_kb():
    assert sum(path.stat().st_size for path in WEB.rglob("*") if path.is_file()) <= 155_000
