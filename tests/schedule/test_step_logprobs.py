"""Log-probabilities on their way from a step's result to the detokenizers' frames."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.wire.frames import StepFrame
from asyncengine.wire.pipes import Pipes, make_run_dir
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.plan import StepLogprobs, StepPlan, StepResult
from gpu_runner.schedule.step_output import StepOutput


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def logprobs_of(rows: list[int]) -> StepLogprobs:
    """Row r has the log-probability -r and, r times, the id r at -r / 2."""
    counts = np.array(rows, np.int32)
    return StepLogprobs(
        rows=counts.copy(),
        logprobs=-counts.astype(np.float32),
        top_ends=np.cumsum(counts, dtype=np.int32),
        top_ids=np.repeat(counts, counts),
        top_logprobs=np.repeat(counts, counts).astype(np.float32) * np.float32(-0.5),
    )


def columns(logprobs: StepLogprobs | None) -> list[list[float]] | None:
    if logprobs is None:
        return None
    assert [column.dtype.str for column in parts(logprobs)] == ["<i4", "<f4", "<i4", "<i4", "<f4"]
    return [column.tolist() for column in parts(logprobs)]


def parts(logprobs: StepLogprobs) -> tuple[np.ndarray, ...]:
    return logprobs.rows, logprobs.logprobs, logprobs.top_ends, logprobs.top_ids, logprobs.top_logprobs


def test_rows_that_leave_take_their_log_probabilities_with_them() -> None:
    logprobs = logprobs_of([0, 2, 3])
    assert columns(logprobs.of(np.ones(5, np.bool_))) == columns(logprobs)
    kept = logprobs.of(np.array([False, True, False, True, True]))
    assert columns(kept) == [[1], [-3.0], [3], [3, 3, 3], [-1.5] * 3]
    no_tops = logprobs.of(np.array([True, True, False, False, False]))
    assert columns(no_tops) == [[0], [0.0], [0], [], []]
    assert logprobs.of(np.array([False, True, False, False, True])) is None


class Reporting:
    """The paged model; every row that samples reports its own row number."""

    def __init__(self, core: EngineCore) -> None:
        self.model, self.plans = core.model, list[StepPlan]()

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.model.launch(plan)

    def collect(self) -> StepResult:
        result, plan = self.model.collect(), self.plans.pop(0)
        rows = np.flatnonzero(plan.row_samples & (result.tokens >= 0))
        return StepResult(result.step, result.tokens, result.finish, logprobs=logprobs_of(rows.tolist()))


def test_rows_that_end_early_are_left_out_and_the_others_keep_theirs() -> None:
    core = EngineCore(max_num_seqs=4)
    core.model = Reporting(core)
    for rid in range(4):
        core.add(rid, np.arange(3 + rid, dtype=np.int32), 9, ignore_eos=True)
    core.turn()
    core.turn()
    core.abort(1)  # a step that holds it is still in flight
    core.run()
    core.assert_all_right()
    assert core.logprobs[0] == [(0.0, {})] * 9
    assert [chosen for chosen, _ in core.logprobs[3]] == [-3.0] * 2 + [-2.0] * 7
    assert core.logprobs[3][-1] == (-2.0, {2: -1.0})
    assert len(core.logprobs[1]) == len(core.outputs[1]) == 1


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    yield pipes
    pipes.close()
    shutil.rmtree(run_dir)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_frame_has_the_log_probabilities_of_its_own_rows(pipes: Pipes, shards: int) -> None:
    receivers = [pipes.receiver(f"detokenizer.{index}", StepFrame) for index in range(shards)]
    outbox = Outbox(pipes=pipes, detokenizers=shards)
    slots = int32(4, 7, 2, 5)
    for logprobs in (logprobs_of([1, 2, 3]), logprobs_of([1]), None):
        output = StepOutput(1, slots, slots, slots, np.zeros(4, np.uint8), (), logprobs)
        outbox.send(output)
        frames: list[StepFrame] = []
        for receiver in receivers:
            receiver.wait(2000)
            frames += receiver.drain()
        assert len(frames) == shards
        for index, frame in enumerate(frames):
            mine = slots % shards == index
            expected = logprobs and logprobs.of(mine)
            sent = [frame.logprob_rows, frame.logprobs, frame.top_ends, frame.top_ids, frame.top_logprobs]
            assert sent == ([b""] * 5 if expected is None else [column.tobytes() for column in parts(expected)])
