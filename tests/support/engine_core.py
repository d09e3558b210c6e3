"""The scheduler and a device in the loop's order, two steps deep, without processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from support.copy_engine import CopyEngine, ExecutorCopies, PrefixModel
from support.paged_model import PagedModel, expected_output

from asyncengine.config import SchedulingPolicy
from asyncengine.sampling import SamplingParams
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open, PromptLogprobs
from asyncengine.wire.requests import Resume
from gpu_runner.schedule.mask_work import MaskWork
from gpu_runner.schedule.plan import StepLogprobs, StepPlan
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.schedule.step_output import StepOutput

TokenLogprobs = tuple[float, dict[int, float]]
"""A token's log-probability, and the most likely tokens', from the most likely one down."""


class EngineCore:
    """Runs requests to their end and keeps what a detokenizer would have been told of each.

    device: something with the executor's `launch` and `collect`; None is a `PagedModel`. depth: steps in flight.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        policy: SchedulingPolicy = "fcfs",
        enable_prefix_caching: bool = True,
        vocab_size: int = 50,
        eos_ids: tuple[int, ...] = (0,),
        check: bool = True,
        device: Any = None,
        depth: int = 2,
        session_pin_share: float = 0.25,
        clock: Callable[[], int] = time.monotonic_ns,
        host_pages: int = 0,
        page_load_ns: int = 0,
        copies_done: Callable[[], int] = lambda: 1,
    ) -> None:
        """host_pages: of a tier in host memory; `copies_done`: how many batches of copies a turn sees done at most."""
        self.vocab_size, self.eos_ids, self.check, self.depth = vocab_size, eos_ids, check, depth
        self.scheduler = Scheduler(
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_ids=eos_ids,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            session_pin_share=session_pin_share,
            clock=clock,
            host_pages=host_pages,
            page_load_ns=page_load_ns,
        )
        self.model = device or (PrefixModel if host_pages else PagedModel)(
            num_slots=self.scheduler.slots.num_slots,
            num_pages=num_pages,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self.copy_engine: CopyEngine | ExecutorCopies | None = None
        if host_pages and isinstance(self.model, PrefixModel):
            self.copy_engine = CopyEngine(self.model, host_pages=host_pages, rng=np.random.default_rng(0))
        elif host_pages:
            self.copy_engine = ExecutorCopies(self.model)
        self.copies_done = copies_done
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.asked: dict[int, tuple[SamplingParams, int]] = {}  # of each rid, and its number among its choices
        self.prompts: dict[int, np.ndarray] = {}
        self.limits: dict[int, int] = {}
        self.stop_ids: dict[int, tuple[int, ...]] = {}
        self.outputs: dict[int, list[int]] = {}  # with what a request came with
        self.opens: dict[int, Open] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}  # of requests that ask, in the order of their tokens
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # of requests that ask
        self.finish: dict[int, Finish] = {}
        self.finish_order: list[int] = []
        self.row_of: dict[tuple[int, int], int] = {}  # (slot, gen) -> rid

    def add(
        self,
        rid: int,
        prompt: np.ndarray | list[int],
        max_tokens: int,
        *,
        namespace: str = "",
        terms: Terms = DEFAULT_TERMS,
        **params: Any,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        self.add_request(rid, np.asarray(prompt, np.int32), sampling, namespace=namespace, terms=terms)

    def add_request(
        self,
        rid: int,
        prompt: np.ndarray,
        sampling: SamplingParams,
        resume: tuple[Resume, ...] = (),
        *,
        namespace: str = "",
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        max_tokens = sampling.max_tokens
        assert max_tokens is not None
        self.scheduler.add(
            rid=rid,
            prompt=prompt,
            params=sampling,
            max_tokens=max_tokens,
            resume=resume,
            namespace=namespace,
            terms=terms,
        )
        choices = [part.choice for part in resume] or range(sampling.n)
        for own, choice in enumerate(choices, rid):
            self.asked[own] = sampling, choice
            self.prompts[own] = prompt
            self.limits[own] = len(prompt) + max_tokens
            self.stop_ids[own] = sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_ids)
        self._verify()

    def resume(self, rid: int, old: dict[int, int], *, of: EngineCore | None = None) -> None:
        """Go on with choices of one request as `rid`, `rid + 1`, ... old: by its rid in core `of` (this one), how many
        of its tokens each has."""
        of = of or self
        parts = []
        for each, count in old.items():
            params, choice = of.asked[each]
            ids = np.array(of.outputs.get(each, [])[:count], np.int32)
            parts.append(Resume(choice, ids.tobytes(), 0))
        self.add_request(rid, of.prompts[each], params, tuple(parts))

    def abort(self, rid: int) -> None:
        self.scheduler.abort(rid)
        self._verify()

    def stop(self, slot: int, gen: int) -> None:
        runs = bool(self.scheduler.slots.gen[slot] == gen)  # else it was aborted, and its end may be on its way
        self.scheduler.stop(slot, gen)
        rid = self.row_of.get((slot, gen))
        if runs and rid is not None and rid not in self.finish:
            self._finish(rid, Finish.STOP_STRING)
        self._verify()

    def turn(self) -> bool:
        """What the loop does in one round; False when it would go idle."""
        plan = self.scheduler.plan()
        self._verify()
        if plan is not None:
            self.plans.append(plan)
            self.model.launch(plan)
            self.in_flight.append(plan)
        self._transfer()
        if self.in_flight and (plan is None or len(self.in_flight) == self.depth):
            self._take(self.scheduler.commit(self.in_flight.popleft(), self.model.collect()))
            self._verify()
        work = self.scheduler.masked_rows.take_work()
        if work is not None:
            self.make_masks(work)
        closed = self.scheduler.take_closed()
        if closed is not None:
            self._take(closed)
        return bool(plan is not None or self.in_flight or self.scheduler.has_work or self.scheduler.copying)

    def _transfer(self) -> None:
        if self.copy_engine is None:
            return
        if (batch := self.scheduler.take_transfers()) is not None:
            self.copy_engine.start(batch)
            self._verify()
        self.copy_engine.finish(self.copies_done())
        self.scheduler.transferred(self.copy_engine.done_ticket)
        self._verify()

    def make_masks(self, work: MaskWork) -> None:
        """Every mask is there at once; the device has it already."""
        slots = np.array([row.slot for row in work.opened], np.int32)
        gens = np.array([row.gen for row in work.opened], np.int32)
        self.scheduler.masked_rows.ready(np.concatenate([slots, work.slots]), np.concatenate([gens, work.gens]))

    def run(self, max_turns: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError(f"still busy after {max_turns} turns: {self.scheduler.gauges()}")

    def expected(self, rid: int) -> list[int]:
        return expected_output(
            self.prompts[rid], limit=self.limits[rid], vocab_size=self.vocab_size, stop_ids=self.stop_ids[rid]
        )

    def assert_all_right(self) -> None:
        """Every request that was not cut short has exactly its own output; every other a prefix of it."""
        for rid in self.prompts:
            expected, got = self.expected(rid), self.outputs.get(rid, [])
            if self.finish.get(rid) in (Finish.STOP, Finish.LENGTH):
                assert got == expected, f"request {rid}"
                last = Finish.STOP if expected[-1] in self.stop_ids[rid] else Finish.LENGTH
                assert self.finish[rid] == last
            else:
                assert got == expected[: len(got)], f"request {rid}"

    def assert_prompts_scored(self, asked: dict[int, int]) -> None:
        """Every request that has opened has, where that was asked, each token of its prompt scored once, in order, by a
        `PagedModel`. asked: by rid, how many likely tokens."""
        assert set(self.prompt_logprobs) == set(self.outputs) & set(asked)
        for rid, scored in self.prompt_logprobs.items():
            prompt, num_top = self.prompts[rid], asked[rid]
            before = prompt[:-1]
            ids = np.concatenate([prompt[:1], np.column_stack([prompt[1:], *[before] * num_top]).reshape(-1)])
            assert np.array_equal(np.frombuffer(scored.ids, np.int32), ids)
            assert np.array_equal(np.frombuffer(scored.logprobs, np.float32)[1:], -np.repeat(before, 1 + num_top))
            ranks = np.arange(1, len(prompt) + 1)
            ranks[0] = 0
            assert np.array_equal(np.frombuffer(scored.ranks, np.int32), ranks)

    def assert_nothing_held(self) -> None:
        gauges = self.scheduler.gauges()
        assert gauges["running"] == gauges["waiting"] == 0
        assert gauges["free_pages"] + gauges["cached_pages"] + gauges["pinned_pages"] == gauges["total_pages"]
        assert self.scheduler.slots.num_free == self.scheduler.slots.num_slots

    def _take(self, output: StepOutput) -> None:
        for row in output.opens:
            assert (row.slot, row.gen) not in self.row_of, "a row opens once"
            self.row_of[row.slot, row.gen] = row.rid
            self.opens[row.rid] = row
            self.outputs[row.rid] = np.frombuffer(row.resumed, np.int32).tolist()
            if row.prompt is not None:
                self.prompt_logprobs[row.rid] = row.prompt
        if output.logprobs is not None:
            self._take_logprobs(output, output.logprobs)
        columns = (output.slots, output.gens, output.tokens, output.finish)
        for slot, gen, token, finish in zip(*(column.tolist() for column in columns), strict=True):
            rid = self.row_of[slot, gen]
            assert rid not in self.finish, "nothing follows a row's end"
            if token >= 0:
                self.outputs[rid].append(token)
            if finish:
                self._finish(rid, Finish(finish))

    def _take_logprobs(self, output: StepOutput, logprobs: StepLogprobs) -> None:
        begin = 0
        columns = (logprobs.rows, logprobs.logprobs, logprobs.top_ends)
        for row, chosen, end in zip(*(column.tolist() for column in columns), strict=True):
            assert output.tokens[row] >= 0
            tops = dict(
                zip(logprobs.top_ids[begin:end].tolist(), logprobs.top_logprobs[begin:end].tolist(), strict=True)
            )
            rid = self.row_of[int(output.slots[row]), int(output.gens[row])]
            self.logprobs.setdefault(rid, []).append((chosen, tops))
            begin = end
        assert begin == len(logprobs.top_ids) == len(logprobs.top_logprobs)

    def _finish(self, rid: int, finish: Finish) -> None:
        self.finish[rid] = finish
        self.finish_order.append(rid)

    def _verify(self) -> None:
        if self.check:
            self.scheduler.check_integrity()
