"""No garbage is looked for while a process starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from atom.process.gc_utils import no_collection, settle


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_meanwhile_and_what_stays_is_frozen():
    before = gc.get_freeze_count()  # of what tests/conftest.py has frozen
    with no_collection():
        assert not gc.isenabled() and gc.get_freeze_count() <= before  # other threads may drop some
        made = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_a_collector_that_was_off_stays_off_and_so_does_one_within_another():
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_turns_it_on_again():
    with pytest.raises(ZeroDivisionError), no_collection():
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.slow
def test_settling_freezes_what_there_is():
    before, made = gc.get_freeze_count(), [[number] for number in range(1000)]
    settle()
    assert gc.get_freeze_count() >= before + len(made)
