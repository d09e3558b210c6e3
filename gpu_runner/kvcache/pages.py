"""The pool of KV-cache pages: who may be given which page, and when a page may be given again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

# numpy adds a scalar by making such an array of it first, which takes longer than the sum.
_ONE: Int32 = np.ones((), np.int32)
_NONE: Int32 = np.zeros((), np.int32)
_ONE.flags.writeable = _NONE.flags.writeable = False

FEW = 4
"""Pages of a row's own when it ends, all others being the prefix tree's: hardly more than these."""
DUMMY_PAGE = 0
"""The page that rows without work write to. It is never handed out."""


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class IntegrityError(AssertionError):
    """The cache's bookkeeping contradicts itself: a bug, never bad input."""


def require(holds: bool | np.bool_, otherwise: str) -> None:
    """Raise `IntegrityError` with the message unless the invariant holds."""
    if not holds:
        raise IntegrityError(otherwise)


class PagePool:
    """Reference-counted pages on a stack, freed only after the last step that may touch them.

    Epochs are step numbers, counted from 1; epoch 0 means "no step used it". A holder that lets go names the last step
    launched with the page; the page is handed out again once the latest epoch named by any of its holders is complete:

        host    launch 7 | launch 8 | read 7: row ends, decref(page, 8) | launch 9 | read 8: complete(8), page is free
        device           [ step 7  ][ step 8: overshoot row still reads page ][ step 9 ]

    Every page other than the dummy is in exactly one state: referenced (count > 0), deferred, or free. All operations
    cost O(pages given), vectorised where they are many, `complete` O(pages deferred).
    """

    def __init__(self, num_pages: int) -> None:
        """num_pages: pages of the device's cache, the dummy page 0 included; at least 2."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (the dummy page and one more), got {num_pages}")
        self.num_pages = num_pages
        self.completed_epoch = 0
        self.start_over()

    def start_over(self) -> None:
        """All pages are free. Nobody may hold any, nor a step that has been launched touch them."""
        self.num_free = self.num_pages - 1
        self.num_deferred = 0
        # The first num_free entries are the free pages. numpy looks int32 indices up three times slower.
        self._stack: Index = np.zeros(self.num_pages, dtype=np.intp)
        self._stack[: self.num_free] = np.arange(self.num_free, 0, -1)
        self._refcount = np.zeros(self.num_pages, dtype=np.int32)  # [num_pages]
        self._last_epoch = np.zeros(self.num_pages, dtype=np.int64)  # [num_pages], latest step that may touch the page
        self._deferred: list[Index] = []

    def allocate(self, count: int) -> Int32:
        """Take `count` pages with reference count 1 each: [count] page ids. Raises `OutOfPages`, taking nothing."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > self.num_free:
            raise OutOfPages(f"{count} pages asked for, {self.num_free} free ({self.num_deferred} deferred)")
        rest = self.num_free - count
        pages = self._stack[rest : self.num_free][::-1]
        self.num_free = rest
        self._refcount[pages] = _ONE
        return pages.astype(np.int32)

    def incref(self, pages: Int32) -> None:
        """Add a reference to each of `pages`, [n] without duplicates, all referenced by somebody already."""
        index = pages.astype(np.intp)
        counts = self._refcount[index]
        self._require_referenced(pages, counts)
        self._refcount[index] = counts + _ONE

    def decref(self, pages: Int32, epoch: int) -> int:
        """Drop a reference to each of `pages`, [n] without duplicates, which steps up to `epoch` may still touch.

        Pages that reach 0 are free at once if every epoch named for them is complete, else when it is. Returns how many
        became free at once.
        """
        if len(pages) <= FEW:
            return self._decref_few(pages, epoch)
        index = pages.astype(np.intp)
        counts = self._refcount[index]
        self._require_referenced(pages, counts)
        counts -= _ONE
        self._refcount[index] = counts
        gone = index[counts == _NONE]
        if epoch > self.completed_epoch:
            self._last_epoch[index] = np.maximum(self._last_epoch[index], epoch)
            self._defer(gone)
            return 0
        late = self._last_epoch[gone] > self.completed_epoch  # `epoch` is complete, and makes nobody wait
        if np.count_nonzero(late):
            self._defer(gone[late])
            gone = gone[~late]
        return self._push(gone)

    def _decref_few(self, pages: Int32, epoch: int) -> int:
        """The same, page by page: what numpy takes to begin with is many times as much."""
        ids = pages.tolist()
        counts = [self._refcount.item(page) - 1 for page in ids]
        if min(counts, default=0) < 0:
            self._require_referenced(pages, self._refcount[pages])
        ready: list[int] = []
        late: list[int] = []
        for page, count in zip(ids, counts, strict=True):
            self._refcount[page] = count
            self._last_epoch[page] = last_epoch = max(self._last_epoch.item(page), epoch)
            if not count:
                (late if last_epoch > self.completed_epoch else ready).append(page)
        if late:
            self._defer(np.array(late, np.intp))
        return self._push(np.array(ready, np.intp)) if ready else 0

    def complete(self, epoch: int) -> None:
        """Steps up to `epoch` are done on the device: what waited for them becomes free."""
        self.completed_epoch = max(self.completed_epoch, epoch)
        if not self._deferred:
            return
        waiting = np.concatenate(self._deferred)
        ready = self._last_epoch[waiting] <= self.completed_epoch
        late = waiting[~ready]
        self._deferred = [late] if len(late) else []
        self.num_deferred = len(late)
        self._push(waiting[ready])

    def refcount(self, pages: Int32) -> Int32:
        """Reference counts of `pages`: [n]."""
        return self._refcount[pages]

    def check_integrity(self, held: Int32 | None = None) -> None:
        """Recompute every invariant; raises `IntegrityError`.

        held: every page reference the pool's users believe they hold, a page once per reference, in any order.
        """
        free = self._stack[: self.num_free]
        deferred = np.concatenate(self._deferred) if self._deferred else np.empty(0, dtype=np.int32)
        referenced = np.flatnonzero(self._refcount)
        negative = np.flatnonzero(self._refcount < 0)
        require(not len(negative), f"negative reference counts: pages {negative.tolist()}")
        told = self.num_deferred
        require(told == len(deferred), f"num_deferred is {told}, but {len(deferred)} pages are deferred")
        states = np.concatenate((free, deferred, referenced), dtype=np.int64)
        outside = states[(states < 0) | (states >= self.num_pages)]
        require(not len(outside), f"page ids outside 0..{self.num_pages - 1}: {outside.tolist()}")
        times_seen = np.bincount(states, minlength=self.num_pages)
        require(not times_seen[DUMMY_PAGE], "the dummy page is free, deferred or referenced")
        wrong = np.flatnonzero(times_seen[1:] != 1) + 1
        require(
            not len(wrong),
            f"{len(free)} free + {len(deferred)} deferred + {len(referenced)} referenced pages of "
            f"{self.num_pages - 1}: pages {wrong.tolist()} are in {times_seen[wrong].tolist()} states instead of 1",
        )
        done = self.completed_epoch
        require((self._last_epoch[free] <= done).all(), f"a page is free before its last step; {done} are complete")
        late = self._last_epoch[deferred] > done
        require(late.all(), f"a page is deferred past its last step; {done} are complete")
        if held is not None:
            expected = np.bincount(held, minlength=self.num_pages)
            wrong = np.flatnonzero(expected != self._refcount)
            require(
                not len(wrong),
                f"pages {wrong.tolist()} have reference counts {self._refcount[wrong].tolist()}, "
                f"but their owners hold {expected[wrong].tolist()}",
            )

    def _defer(self, pages: Index) -> None:
        if len(pages):
            self._deferred.append(pages)
            self.num_deferred += len(pages)

    def _push(self, pages: Index) -> int:
        count = len(pages)
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count
        return count

    @staticmethod
    def _require_referenced(pages: Int32, counts: Int32) -> None:
        if len(counts) and counts[counts.argmin()] < 1:  # several times quicker than to ask each
            raise IntegrityError(f"pages {pages[counts < 1].tolist()} are not referenced by anybody")
