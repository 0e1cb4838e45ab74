from __future__ import annotations

import re
from pathlib import Path

from scripts.clients.agents import AGENTS, read_settings
from scripts.clients.versions import NPM, PYTHON

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_the_page_of_clients_has_the_versions_that_are_tried():
    table, _, _ = PAGE.read_text().partition("## ")
    tried = (PYTHON | NPM).items() - {("zod", NPM["zod"])}
    assert set(re.findall(r"\d+\.\d+\.\d+", table)) == {version for _, version in tried}


def test_agents_get_the_settings_of_the_page(tmp_path: Path):
    assert 'base_url = "http://there:1/v1"' in read_settings("Codex", "http://there:1")
    for name, agent in AGENTS.items():
        home = tmp_path / name
        home.mkdir()
        environment = agent.configure(home, "http://there:1")
        written = [file.read_text() for file in home.rglob("*") if file.is_file()]
        settings = " ".join([*environment.values(), *written])
        assert "http://there:1" in settings and "coder" in settings, name
