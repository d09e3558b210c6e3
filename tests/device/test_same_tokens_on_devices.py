"""What must not change a request's tokens: graphs, dependent launch, steps in flight, the prefix cache, neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.device_engine import DeviceEngine, device_engine, greedy, random_prompts
from support.long_steps import make_long_from
from support.random_model import VOCAB_SIZE, write_config
from support.reference_logits import ReferenceLogits

from asyncengine.config import Device
from asyncengine.sampling import SamplingParams
from gpu_runner.device.graph_step import GraphStep, Phase
from gpu_runner.kernels import launch
from gpu_runner.schedule.plan import StepPlan

pytestmark = pytest.mark.timeout(400)

NUM_TOKENS = 16
MAX_GAP = 0.05
"""Where the reference prefers a token by less, bfloat16 may choose another."""
MAX_ERROR = 2e-2
PROMPTS = random_prompts([1, 5, 16, 33, 47, 80, 2, 64], VOCAB_SIZE)
"""More than run at once, and longer than a step."""
LONG_BYTES = 230 * 2 * 2 * 64 * 2
"""Of 230 tokens; the first six prompts, with what comes of them, grow from 208 to 256 while all of them decode."""
GREEDY = [greedy(NUM_TOKENS)] * len(PROMPTS)
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=9, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=31, seed=4, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.7, min_p=0.01, max_tokens=17, seed=5, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=1.5, max_tokens=24, seed=-6, ignore_eos=True),
    SamplingParams(
        temperature=0.7, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=12, seed=7, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, logit_bias=((9, 0.2),), logprobs=2, max_tokens=28, ignore_eos=True),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    name: Device = request.param
    return name


only_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
"""What the CPU has none of."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: str, device: Device) -> Iterator[DeviceEngine]:
    with device_engine(model, device=device, dtype="bfloat16", load_format="dummy") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(model: str, device: Device) -> ReferenceLogits:
    return ReferenceLogits(model, dtype=torch.bfloat16, device=torch.device(device))


def assert_best(reference: ReferenceLogits, prompts: list[np.ndarray], outputs: list[list[int]]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        assert reference.gaps(prompt, output).max() < MAX_GAP


@only_a_gpu
def test_graphs_change_no_bit_of_the_logits(engine: DeviceEngine, model: str, device: Device) -> None:
    captured = engine.run_with_logits(PROMPTS, MIXED)
    with device_engine(model, device=device, dtype="bfloat16", load_format="dummy", graphs=False) as uncaptured:
        launched = uncaptured.run_with_logits(PROMPTS, MIXED)
    for (tokens, logits), (same_tokens, same_logits) in zip(captured, launched, strict=True):
        assert tokens == same_tokens
        assert torch.equal(logits, same_logits)


def test_two_steps_in_flight_give_the_tokens_of_one(engine: DeviceEngine) -> None:
    assert engine.run(PROMPTS, MIXED, depth=2) == engine.run(PROMPTS, MIXED, depth=1)


def test_a_run_can_be_repeated(engine: DeviceEngine) -> None:
    assert engine.run(PROMPTS, MIXED) == engine.run(PROMPTS, MIXED)


@only_a_gpu
def test_dependent_launch_leaves_the_best_tokens(
    engine: DeviceEngine, reference: ReferenceLogits, model: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_best(reference, PROMPTS, engine.run(PROMPTS, GREEDY))
    monkeypatch.setattr(launch, "uses_pdl", lambda x: False)
    with device_engine(model, device=device, dtype="bfloat16", load_format="dummy") as without:
        assert_best(reference, PROMPTS, without.run(PROMPTS, GREEDY))


@only_a_gpu
def test_rows_whose_contexts_become_long_while_they_decode_get_the_best_tokens(
    reference: ReferenceLogits, model: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_long_from(monkeypatch, LONG_BYTES)
    phases: list[Phase] = []
    choose = GraphStep._phase

    def note(step: GraphStep, plan: StepPlan) -> Phase:
        phases.append(choose(step, plan))
        return phases[-1]

    monkeypatch.setattr(GraphStep, "_phase", note)
    with device_engine(model, device=device, dtype="bfloat16", load_format="dummy") as engine:
        assert_best(reference, PROMPTS, engine.run(PROMPTS, GREEDY))
        assert ("decode", "long decode") in pairwise(phases)
        phases.clear()
        captured = engine.run_with_logits(PROMPTS, MIXED)
        assert {"decode", "long decode"} <= set(phases)
    with device_engine(model, device=device, dtype="bfloat16", load_format="dummy", graphs=False) as uncaptured:
        launched = uncaptured.run_with_logits(PROMPTS, MIXED)
    for (tokens, logits), (same_tokens, same_logits) in zip(captured, launched, strict=True):
        assert tokens == same_tokens
        assert torch.equal(logits, same_logits)


@pytest.mark.parametrize("caching", [True, False])
def test_the_prefix_cache_leaves_the_best_tokens(
    engine: DeviceEngine, reference: ReferenceLogits, caching: bool
) -> None:
    common = random_prompts([70], VOCAB_SIZE, seed=2)[0]
    prompts = [np.concatenate((common, tail)) for tail in random_prompts([1, 9, 30], VOCAB_SIZE, seed=3)]
    core = engine.core(enable_prefix_caching=caching)
    for rid, prompt in enumerate((common, *prompts, *prompts)):
        core.add_request(rid, prompt, greedy(NUM_TOKENS))
        core.run()
    assert core.scheduler.gauges()["prefix_hit_tokens"] == (3 * 64 + 64 + 64 + 80 + 16 if caching else 0)
    assert_best(reference, [common, *prompts, *prompts], [core.outputs[rid] for rid in range(7)])


# ----------------------------------------------------------------------------------------------------------- neighbours

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=NUM_TOKENS, seed=11, ignore_eos=True)
SEEDED_PROMPT = random_prompts([37], VOCAB_SIZE, seed=4)[0]
NEIGHBOURHOODS: list[tuple[list[int], list[int], dict[str, Any]]] = [
    # prompt lengths of those that come before it, and after it; their parameters
    ([], [], {}),
    ([7], [], {"temperature": 0.0}),
    ([1, 2, 3], [], {"temperature": 1.0}),
    ([], [40], {"temperature": 1.0, "top_k": 3}),
    ([], [5, 6, 7, 8, 90], {"temperature": 2.0}),
    ([60, 3], [20, 1, 1], {"temperature": 0.5, "min_p": 0.1}),
    ([30, 31, 32, 33, 34], [], {"temperature": 1.0, "seed": 11}),
    ([100], [16, 16], {"temperature": 0.9, "min_tokens": 5}),
]


def among(
    engine: DeviceEngine, neighbourhood: tuple[list[int], list[int], dict[str, Any]]
) -> tuple[list[int], torch.Tensor]:
    """The seeded request's tokens and logits."""
    before, after, parameters = neighbourhood
    prompts = random_prompts([*before, *after], VOCAB_SIZE, seed=5)
    prompts.insert(len(before), SEEDED_PROMPT)
    params = [SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **parameters})] * len(before + after)
    params.insert(len(before), SEEDED)
    return engine.run_with_logits(prompts, params, enable_prefix_caching=False)[len(before)]


def test_a_seeded_request_draws_the_same_tokens_among_any_neighbours(model: str, device: Device) -> None:
    """In float32, where the last bits that sums in batches of another size differ in decide nothing."""
    with device_engine(model, device=device, dtype="float32", load_format="dummy") as engine:
        outputs = [among(engine, neighbourhood)[0] for neighbourhood in NEIGHBOURHOODS]
    assert len(set(outputs[0])) > 8
    assert outputs == [outputs[0]] * len(NEIGHBOURHOODS)


def test_in_bfloat16_neighbours_move_logits_by_no_more_than_rounding(engine: DeviceEngine) -> None:
    tokens, logits = among(engine, NEIGHBOURHOODS[0])
    for neighbourhood in NEIGHBOURHOODS[1:]:
        others, moved = among(engine, neighbourhood)
        differ = [index for index, (ours, theirs) in enumerate(zip(tokens, others, strict=True)) if ours != theirs]
        same = differ[0] + 1 if differ else NUM_TOKENS  # logits that follow the same tokens
        error = (logits[:same] - moved[:same]).norm(dim=1) / logits[:same].norm(dim=1)
        assert error.max() < MAX_ERROR
