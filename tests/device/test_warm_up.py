"""The steps before the first: on each device, whatever it has room for, and without a trace in later answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.device_engine import DeviceEngine, device_engine, greedy, random_prompts
from support.random_model import VOCAB_SIZE, write_config

from asyncengine.config import PAGE_SIZE, Device
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.transfers import Transfers
from gpu_runner.warm_up import ANSWER_TOKENS, MAX_TOKENS, warm_up


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngine]:
    device: Device = request.param
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    with device_engine(model, device=device, dtype="float32", load_format="dummy") as engine:
        yield engine


class Watched:
    """An executor whose plans are kept."""

    host_pages = 0

    def __init__(self, engine: DeviceEngine) -> None:
        self.plans: list[StepPlan] = []
        self._executor = engine.executor

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._executor.launch(plan)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def transfer(self, batch: Transfers) -> None:
        raise AssertionError(batch)

    def transferred(self) -> int:
        raise AssertionError


@pytest.mark.parametrize("max_model_len", [2, 5, 16, 17, 1000])
def test_a_prompt_and_its_answer_are_computed_within_what_there_is(engine: DeviceEngine, max_model_len: int) -> None:
    watched = Watched(engine)
    warm_up(watched, max_model_len=max_model_len, max_step_tokens=engine.executor.max_step_tokens)
    prefilled = sum(len(plan.prefill_tokens) for plan in watched.plans)
    sampled = sum(int(plan.row_samples.sum()) for plan in watched.plans)
    room = min(max_model_len, MAX_TOKENS)
    assert prefilled == max(1, room - ANSWER_TOKENS)
    assert sampled == room - prefilled
    pages = {page for plan in watched.plans for page in plan.page_id.tolist()}
    assert pages == set(range(1, 1 + -(-(room - 1) // PAGE_SIZE))), "the last token has no key and no value"


def test_later_answers_are_the_same(engine: DeviceEngine) -> None:
    prompts = random_prompts([5, 40, 1, 17], VOCAB_SIZE)
    params = [greedy(12)] * len(prompts)
    before = engine.run(prompts, params)
    warm_up(engine.executor, max_model_len=1000, max_step_tokens=engine.executor.max_step_tokens)
    assert engine.run(prompts, params) == before
