"""How many prompt tokens beside decoding rows are worth a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from gpu_runner.schedule.buckets import bucket_for
from gpu_runner.schedule.step_time import StepTime

HOLD_NS = 20_000_000
"""Prompts wait no longer than this for others: less than anybody notices in a first token."""
MANY_ROWS = 64
MANY_SHARE = 4
"""With fewer decoding rows than these, or than one in so many of all that may run, prompts start at once: so few rows
end that others hardly come meanwhile."""
DEAR = 1.25
"""What a prompt token may cost for its step not to be waited with, in costs of one in the largest step."""
LEAST_CUT = 16
"""Prompt tokens of a step that leaves others to the next."""


class PromptBatches:
    """Many rows decode, so rows end and prompts come with almost every step. To compute each few tokens at once would
    make most steps pay for what any prompt costs a step, and for the padding to its bucket. So few prompts wait for
    others, and many are cut to a full bucket, whichever makes a token cheap:

        what steps take with w prompt tokens     *           *          *   bucket
        and without any                 ________________________________
                                        0        w1          w2         w

    The slope from `without` to each point is what a token costs there; the largest step has the least of it.
    """

    def __init__(
        self, step_time: StepTime, buckets: tuple[int, ...], *, max_num_seqs: int, clock: Callable[[], int]
    ) -> None:
        """clock: in ns."""
        self._step_time = step_time
        self._buckets = buckets
        self._least_rows = max(MANY_ROWS, max_num_seqs // MANY_SHARE)
        self._clock = clock
        # When prompts that wait now could first have been placed; 0 = none wait. One that is aborted leaves it behind,
        # so that the next one starts at once.
        self._since = 0

    def room(self, budget: int, *, rows: int, prompts: int) -> int:
        """How many of `budget` tokens to place beside so many decoding rows, 0 for none in this step. prompts: tokens
        that could be placed."""
        prompts = min(prompts, budget)
        if not prompts or rows < self._least_rows:
            self._since = 0
            return budget
        buckets, largest = self._buckets, self._buckets[-1]
        alone = self._step_time.step_ns(bucket_for(buckets, rows), 0, 0)
        cheap = (self._step_ns(largest) - alone) / (largest - rows)
        placed, cost = prompts, (self._step_ns(rows + prompts) - alone) / prompts
        border = buckets[bisect_right(buckets, rows + prompts) - 1] - rows
        if LEAST_CUT <= border < prompts:
            cut_cost = (self._step_ns(rows + border) - alone) / border
            if cut_cost < cost:
                placed, cost = border, cut_cost
        if cost > DEAR * cheap > 0.0:
            now = self._clock()
            self._since = self._since or now
            if now - self._since < HOLD_NS:
                return 0
            placed = prompts  # those that have waited are not cut
        self._since = 0
        return placed if placed < prompts else budget

    def _step_ns(self, tokens: int) -> float:
        """With prompts, but without what their length and the rows' context cost."""
        return self._step_time.step_ns(bucket_for(self._buckets, tokens), 0, 1)
