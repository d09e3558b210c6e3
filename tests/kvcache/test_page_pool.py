"""The page pool: allocation, reference counts, and frees that wait for the last step that touches a page."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_runner.kvcache.pages import Int32, IntegrityError, OutOfPages, PagePool


def ids(*pages: int) -> Int32:
    return np.array(pages, dtype=np.int32)


def test_a_new_pool_has_every_page_free_but_the_dummy() -> None:
    pool = PagePool(5)
    assert (pool.num_pages, pool.num_free, pool.num_deferred, pool.completed_epoch) == (5, 4, 0, 0)
    pages = pool.allocate(4)
    assert pages.tolist() == [1, 2, 3, 4]
    assert pages.dtype == np.int32
    assert pool.refcount(ids(0, 1, 2, 3, 4)).tolist() == [0, 1, 1, 1, 1]
    pool.check_integrity(pages)


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(2).tolist() == [3, 4]
    assert pool.allocate(0).tolist() == []


def test_a_pool_needs_a_page_besides_the_dummy_and_counts_are_not_negative() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)
    with pytest.raises(ValueError, match="negative"):
        PagePool(2).allocate(-1)


def test_the_caller_may_change_the_array_it_was_given() -> None:
    pool = PagePool(5)
    pool.allocate(2)[:] = 0
    pool.check_integrity(ids(1, 2))
    pool.refcount(ids(1, 2))[:] = 9
    pool.check_integrity(ids(1, 2))


def test_a_page_is_free_when_its_last_reference_goes() -> None:
    pool = PagePool(5)
    pages = pool.allocate(3)
    pool.incref(pages[:2])
    assert pool.decref(pages, 0) == 1
    assert pool.refcount(pages).tolist() == [1, 1, 0]
    assert pool.decref(pages[:2], 0) == 2
    assert pool.num_free == 4
    pool.check_integrity(ids())


def test_a_page_is_deferred_until_the_step_that_may_read_it_is_complete() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert pool.decref(pages[:1], 7) == 0
    assert pool.decref(pages[1:2], 8) == 0
    assert (pool.num_free, pool.num_deferred) == (0, 2)
    pool.complete(6)
    assert (pool.num_free, pool.num_deferred) == (0, 2)
    pool.complete(7)
    assert (pool.num_free, pool.num_deferred) == (1, 1)
    assert pool.decref(pages[2:], 7) == 1
    pool.complete(8)
    assert (pool.num_free, pool.num_deferred) == (3, 0)
    pool.check_integrity(ids())


def test_completion_never_goes_backwards() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.complete(5)
    pool.complete(3)
    assert pool.completed_epoch == 5
    assert pool.decref(pages, 4) == 1


def test_the_latest_epoch_of_all_holders_counts_not_that_of_the_last_one_to_leave() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.incref(pages)
    pool.complete(4)
    assert pool.decref(pages, 5) == 0
    assert pool.decref(pages, 3) == 0
    assert (pool.num_free, pool.num_deferred) == (2, 1)
    pool.complete(5)
    assert (pool.num_free, pool.num_deferred) == (3, 0)


def test_releasing_or_sharing_a_page_nobody_holds_is_refused_and_changes_nothing() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.decref(pages[1:], 0)
    for operation in (pool.incref, lambda given: pool.decref(given, 0)):
        with pytest.raises(IntegrityError, match=r"pages \[2\] are not referenced"):
            operation(pages)
        with pytest.raises(IntegrityError, match=r"pages \[0\] are not referenced"):
            operation(ids(0))
    pool.check_integrity(ids(1))


def test_a_deferred_page_cannot_be_taken_up_again() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.decref(pages, 1)
    with pytest.raises(IntegrityError):
        pool.incref(pages)


def test_empty_arrays_are_fine_everywhere() -> None:
    pool = PagePool(4)
    pool.incref(ids())
    assert pool.decref(ids(), 3) == 0
    assert pool.refcount(ids()).tolist() == []
    pool.complete(1)
    pool.check_integrity(ids())


def test_the_integrity_check_tells_owners_that_hold_too_much_or_too_little() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.incref(pages[:1])
    pool.check_integrity(ids(1, 2, 1))
    with pytest.raises(IntegrityError, match=r"pages \[1\] have reference counts \[2\], but their owners hold \[1\]"):
        pool.check_integrity(pages)
    with pytest.raises(IntegrityError, match=r"pages \[2, 3\] have .* \[1, 0\], but their owners hold \[2, 1\]"):
        pool.check_integrity(ids(1, 1, 2, 2, 3))


def test_the_integrity_check_finds_each_kind_of_damage() -> None:
    def damaged() -> PagePool:
        pool = PagePool(6)
        pool.decref(pool.allocate(3)[:1], 2)
        return pool

    pool = damaged()
    pool._stack[0] = 2
    with pytest.raises(IntegrityError, match=r"pages \[2, 5\] are in \[2, 0\] states"):
        pool.check_integrity()
    pool = damaged()
    pool.num_free -= 1
    with pytest.raises(IntegrityError, match="1 free"):
        pool.check_integrity()
    pool = damaged()
    pool._refcount[0] = 1
    with pytest.raises(IntegrityError, match="dummy"):
        pool.check_integrity()
    pool = damaged()
    pool._refcount[4] = -1
    with pytest.raises(IntegrityError, match="negative"):
        pool.check_integrity()
    pool = damaged()
    pool.num_deferred = 0
    with pytest.raises(IntegrityError, match="num_deferred is 0"):
        pool.check_integrity()
    pool = damaged()
    pool.completed_epoch = 2
    with pytest.raises(IntegrityError, match="deferred past"):
        pool.check_integrity()
    pool = damaged()
    pool._last_epoch[4] = 3
    with pytest.raises(IntegrityError, match="free before"):
        pool.check_integrity()
    pool = damaged()
    pool._stack[1] = 6
    with pytest.raises(IntegrityError, match=r"outside 0\.\.5"):
        pool.check_integrity()
