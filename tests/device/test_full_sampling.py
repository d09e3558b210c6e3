"""Penalties, logit bias and log-probabilities of whole requests against a plain loop over the logits of each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.device_engine import DeviceEngine, device_engine, greedy, random_prompts
from support.engine_core import EngineCore
from support.logits_tap import LogitsTap
from support.random_model import VOCAB_SIZE, write_config

from asyncengine.config import Device
from asyncengine.sampling import SamplingParams
from gpu_runner.kernels import reference_sampling
from gpu_runner.kernels.reference_sampling import SamplingRows

pytestmark = pytest.mark.timeout(400)

EOS = 2
MAX_NUM_SEQS = 4
NUM_TOKENS = 20
LENGTHS = [1, 16, 80, 33, 17, 47]
"""Some longer than a step, so that they are chunked; more than run at once."""


def ask(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0, **params})


ASKS = [
    ask(repetition_penalty=1.4, logprobs=3),
    ask(temperature=1.0, seed=5, presence_penalty=1.0, frequency_penalty=0.5),
    ask(temperature=0.8, top_k=20, seed=6, logit_bias=((7, 3.0), (11, 2.5)), frequency_penalty=1.0, logprobs=0, n=2),
    ask(),
    ask(temperature=1.2, top_p=0.7, seed=7, logprobs=20),
    ask(
        frequency_penalty=2.0,
        repetition_penalty=0.7,
        logit_bias=tuple(
            (token, 20.0) for token in range(VOCAB_SIZE - 280, VOCAB_SIZE + 20)
        ),  # some are no ids of this model
        min_tokens=8,
        stop_token_ids=(VOCAB_SIZE - 275, VOCAB_SIZE - 274),
        ignore_eos=False,
        logprobs=2,
    ),
]
RIDS = [0, 1, 2, 4, 5, 6]
"""The third has a second choice."""
CHOICES = [0, 1, 2, 2, 3, 4, 5]
"""Whose each rid is."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    name: Device = request.param
    return name


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[DeviceEngine]:
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    with device_engine(model, device=device, dtype="float32", load_format="dummy", max_num_seqs=MAX_NUM_SEQS) as engine:
        yield engine


def prompts_of(seed: int) -> list[np.ndarray]:
    """Of few ids, so that they repeat."""
    return [prompt % 40 + 3 for prompt in random_prompts(LENGTHS, VOCAB_SIZE, seed=seed)]


def core_over(engine: DeviceEngine, device: Any, *, num_pages: int | None = None, depth: int = 1) -> EngineCore:
    return EngineCore(
        num_pages=num_pages or engine.executor.num_pages,
        max_model_len=engine.executor.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=engine.executor.max_step_tokens,
        vocab_size=VOCAB_SIZE,
        eos_ids=(EOS,),
        device=device,
        depth=depth,
    )


def add_all(core: EngineCore, prompts: list[np.ndarray], first_rid: int = 0) -> None:
    for rid, prompt, params in zip(RIDS, prompts, ASKS, strict=True):
        core.add_request(first_rid + rid, prompt, params)


def plain_token(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams, seed: int) -> int:
    """logits: [VOCAB_SIZE] float32, the model's."""
    x = logits.copy()
    for token, bias in params.logit_bias:
        if token < VOCAB_SIZE:
            x[token] += np.float32(bias)
    for token in {*prompt, *output}:
        r = np.float32(params.repetition_penalty)
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(params.presence_penalty)
    if len(output) < params.min_tokens:
        x[[*params.stop_token_ids, EOS]] = -np.inf
    row = SamplingRows(
        temperature=torch.tensor([params.temperature]),
        top_k=torch.tensor([params.top_k], dtype=torch.int32),
        top_p=torch.tensor([params.top_p]),
        min_p=torch.tensor([params.min_p]),
        seed=torch.tensor([seed]),
        position=torch.tensor([len(prompt) + len(output)], dtype=torch.int32),
    )
    return int(reference_sampling.sample(torch.from_numpy(x)[None], row, filtered=True))


def check(core: EngineCore, tap: LogitsTap, *, first_rid: int = 0) -> None:
    """Every token is what the plain loop draws, and every log-probability that of the model's own logits."""
    logits_of = tap.by_request(core.row_of)
    for choice, index in enumerate(CHOICES):
        rid, params = first_rid + choice, ASKS[index]
        prompt, output, logits = core.prompts[rid].tolist(), core.outputs[rid], logits_of[rid]
        assert len(output) == len(logits) > 8
        seed = (params.seed or 0) + choice - RIDS[index]
        for position, token in enumerate(output):
            assert token == plain_token(logits[position].numpy(), prompt, output[:position], params, seed)
        assert (rid in core.logprobs) == (params.logprobs is not None)
        if params.logprobs is None:
            continue
        expected = logits.log_softmax(dim=1)
        assert len(core.logprobs[rid]) == len(output)
        for position, (token, (chosen, tops)) in enumerate(zip(output, core.logprobs[rid], strict=True)):
            order = logits[position].argsort(descending=True, stable=True)[: params.logprobs].tolist()
            assert list(tops) == order
            assert chosen == pytest.approx(float(expected[position, token]), abs=5e-5)
            assert list(tops.values()) == pytest.approx(expected[position, order].tolist(), abs=1e-5)


def test_requests_of_every_kind_get_the_tokens_and_log_probabilities_of_a_plain_loop(engine: DeviceEngine) -> None:
    tap = LogitsTap(engine.executor, engine.buffer)
    core = core_over(engine, tap)
    add_all(core, prompts_of(1))
    core.run()
    core.assert_nothing_held()
    check(core, tap)
    repeated = max(np.bincount(core.outputs[3]))
    assert repeated < NUM_TOKENS, "the choice's penalties tell"


def test_a_cached_prompt_counts_like_one_that_is_computed(engine: DeviceEngine) -> None:
    tap = LogitsTap(engine.executor, engine.buffer)
    core = core_over(engine, tap)
    prompts = prompts_of(2)
    add_all(core, prompts)
    core.run()
    before = core.scheduler.gauges()["prefix_hit_tokens"]
    add_all(core, prompts, first_rid=100)
    core.run()
    assert core.scheduler.gauges()["prefix_hit_tokens"] - before >= 64 + 32 + 16 + 32
    check(core, tap)
    check(core, tap, first_rid=100)
    assert [core.outputs[rid] for rid in range(7)] == [core.outputs[100 + rid] for rid in range(7)]


def test_retracted_rows_resume_with_what_they_had_said_as_output(engine: DeviceEngine) -> None:
    tap = LogitsTap(engine.executor, engine.buffer)
    core = core_over(engine, tap, num_pages=11)
    prompts = prompts_of(3)
    add_all(core, prompts)
    core.run()
    assert core.scheduler.counters.preemptions > 0
    check(core, tap)


def test_two_steps_in_flight_change_nothing_and_overshoot_rows_report_nothing(engine: DeviceEngine) -> None:
    cores = []
    for depth in (1, 2):
        core = core_over(engine, engine.executor, depth=depth)
        add_all(core, prompts_of(4))
        core.run()
        cores.append(core)
    assert cores[0].outputs == cores[1].outputs
    for rid, logprobs in cores[0].logprobs.items():
        assert len(logprobs) == len(cores[0].outputs[rid])
        for (chosen, tops), (other_chosen, other_tops) in zip(logprobs, cores[1].logprobs[rid], strict=True):
            assert chosen == pytest.approx(other_chosen, abs=1e-3)
            assert list(tops) == list(other_tops)


def test_a_seeded_row_with_penalties_draws_the_same_alone_and_among_others(engine: DeviceEngine) -> None:
    alone = core_over(engine, engine.executor, depth=2)
    alone.add_request(1, prompts_of(1)[1], ASKS[1])
    alone.run()
    among = core_over(engine, engine.executor, depth=2)
    add_all(among, prompts_of(1))
    among.run()
    assert len(set(alone.outputs[1])) > 5
    assert alone.outputs[1] == among.outputs[1]


def test_rows_that_ask_nothing_draw_the_same_beside_rows_that_ask(engine: DeviceEngine) -> None:
    plain = core_over(engine, engine.executor, depth=2)
    plain.add_request(4, prompts_of(1)[3], greedy(NUM_TOKENS))
    plain.run()
    among = core_over(engine, engine.executor, depth=2)
    add_all(among, prompts_of(1))
    among.run()
    assert plain.outputs[4] == among.outputs[4]
    assert not plain.logprobs


def random_ask(rng: np.random.Generator, max_tokens: int) -> SamplingParams:
    biased = rng.permutation(VOCAB_SIZE)[: rng.integers(0, 6)]
    return ask(
        max_tokens=max_tokens,
        temperature=float(rng.choice([0.0, 0.8, 1.3])),
        top_k=int(rng.choice([0, 30])),
        seed=int(rng.integers(2**31)),
        repetition_penalty=float(rng.choice([1.0, 0.8, 1.5])),
        presence_penalty=float(rng.choice([0.0, 0.0, 1.0])),
        frequency_penalty=float(rng.choice([0.0, 0.0, -0.5, 1.5])),
        logit_bias=tuple((int(token), float(rng.uniform(-5, 5))) for token in biased),
        logprobs=[None, 0, 2, 20][rng.integers(4)],
        stop_token_ids=tuple(map(int, rng.permutation(VOCAB_SIZE)[:8])),
    )


def test_random_asks_among_aborts_and_retractions_get_what_they_get_alone(engine: DeviceEngine) -> None:
    rng = np.random.default_rng(7)
    count = 24 if engine.executor.info.device == "cpu" else 200
    lengths = [int(length) for length in rng.integers(1, 70, count)]
    prompts = [prompt % 40 + 3 for prompt in random_prompts(lengths, VOCAB_SIZE, seed=8)]
    asks = [random_ask(rng, int(rng.integers(1, 40))) for _ in range(count)]
    core = core_over(engine, engine.executor, num_pages=14, depth=2)
    for rid in range(count):
        core.add_request(rid, prompts[rid], asks[rid])
        for _ in range(int(rng.integers(0, 8))):
            core.turn()
        if rid % 6 == 5:
            core.abort(rid - 1)
    core.run()
    core.assert_nothing_held()
    assert core.scheduler.counters.preemptions > 0
    for rid in range(count):
        output, logprobs = core.outputs.get(rid, []), core.logprobs.get(rid, [])
        assert len(logprobs) == (0 if asks[rid].logprobs is None else len(output))
        alone = core_over(engine, engine.executor)
        alone.add_request(rid, prompts[rid], asks[rid])
        alone.run()
        ended = rid in core.finish and core.finish[rid] == alone.finish[rid]
        assert output == (alone.outputs[rid] if ended else alone.outputs[rid][: len(output)])
        for (chosen, tops), (same, same_tops) in zip(logprobs, alone.logprobs.get(rid, []), strict=False):
            assert len(tops) == len(same_tops) == asks[rid].logprobs
            assert [chosen, *tops.values()] == pytest.approx([same, *same_tops.values()], abs=1e-3)
