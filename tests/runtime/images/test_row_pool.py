from __future__ import annotations

from atom.runtime.images.row_pool import RowPool


def test_the_least_recently_used_images_make_room() -> None:
    pool = RowPool(10)
    first, second = pool.add(1, 4, {}).tolist(), pool.add(2, 4, {}).tolist()
    assert sorted(first + second) == sorted({*first, *second}), "no row belongs to two images"
    assert pool.find(1).tolist() == first  # so that 2 is older
    third = pool.add(3, 5, {}).tolist()
    assert pool.find(2) is None and pool.find(1).tolist() == first
    assert not set(first) & set(third)


def test_images_that_the_step_needs_keep_their_rows() -> None:
    pool = RowPool(10)
    pool.add(1, 4, {})
    pool.add(2, 4, {})
    pool.add(3, 4, {1, 3})
    assert 1 in pool and 2 not in pool and 3 in pool


def test_forgotten_rows_are_given_again() -> None:
    pool = RowPool(3)
    pool.add(1, 3, {})
    pool.forget(1)
    pool.forget(7)  # which has none
    assert sorted(pool.add(2, 3, {}).tolist()) == [0, 1, 2]
    pool.clear()
    assert sorted(pool.add(2, 3, {}).tolist()) == [0, 1, 2]
