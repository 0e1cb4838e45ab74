"""What is left out of requests, in the log."""

from __future__ import annotations

import pytest

from atom.serve.left_out import MAX_KINDS, LeftOut


def test_each_kind_has_one_line(caplog: pytest.LogCaptureFixture):
    left_out = LeftOut()
    with caplog.at_level("INFO", "atom.serve"):
        for kind in ("web_search", "memory", "web_search"):
            left_out.note(kind, "it is not run here")
    assert [vars(record)["fields"] for record in caplog.records] == [{"kind": "web_search"}, {"kind": "memory"}]
    assert set(caplog.messages) == {"left out of requests: it is not run here"}


def test_names_that_clients_make_up_do_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    left_out = LeftOut()
    with caplog.at_level("INFO", "atom.serve"):
        for number in range(2 * MAX_KINDS):
            left_out.note(f"{number:04}" * 1000, "it is not run here")
    assert len(caplog.records) == MAX_KINDS
    assert max(len(vars(record)["fields"]["kind"]) for record in caplog.records) < 300
