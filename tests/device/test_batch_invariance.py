"""With `batch_invariant` a request's tokens and log-probabilities are the same, bit for bit, whatever else is computed.

Log-probabilities come from the device as float32 and are compared as they are; those of generated and of prompts'
tokens, and of the likeliest ones, are told of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.device_engine import DeviceEngine, device_engine, random_prompts
from support.engine_core import EngineCore
from support.random_model import VOCAB_SIZE, write_config
from support.reference_logits import ReferenceLogits

from asyncengine.config import Device, DType
from asyncengine.sampling import SamplingParams

pytestmark = pytest.mark.timeout(600)

MAX_NUM_SEQS = 32
STEP_TOKENS = 256
"""More than a tile of any kernel has."""
PROMPT = random_prompts([75], VOCAB_SIZE, seed=4)[0]
NUM_TOKENS = 24
ASKED = {
    "greedy": SamplingParams(temperature=0.0, logprobs=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(
        temperature=1.0, top_p=0.9, top_k=200, min_p=0.001, seed=11, logprobs=3, max_tokens=NUM_TOKENS, ignore_eos=True
    ),
    "adjusted": SamplingParams(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((5, 2.0),),
        seed=12, logprobs=2, max_tokens=NUM_TOKENS, ignore_eos=True,
    ),
    "scored": SamplingParams(
        temperature=1.0, seed=13, logprobs=0, prompt_logprobs=2, max_tokens=NUM_TOKENS, ignore_eos=True
    ),
}  # fmt: skip
OTHERS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.8, seed=2, logprobs=4, max_tokens=21, ignore_eos=True),
    SamplingParams(temperature=0.7, presence_penalty=0.5, seed=3, prompt_logprobs=1, max_tokens=9, ignore_eos=True),
]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    # three query heads share a KV head; layers with and without a sliding window, biases, a head that is the embedding
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_attention_heads": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 40,
        "tie_word_embeddings": True,
        "vocab_size": 5_000,  # more than a part of the vocabulary has in any kernel
    },
}
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
Told = list[tuple[list[int], Any, Any]]
"""Of each request asked for: tokens, and log-probabilities of them and of the prompt."""


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> Device:
    name: Device = request.param
    return name


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", "qwen2"),
        pytest.param(("cuda", "qwen2"), marks=pytest.mark.gpu),
        pytest.param(("cuda", "qwen3"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngine]:
    device, name = request.param
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2, **MODELS[name])
    with invariant_engine(model, device) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: DeviceEngine) -> Told:
    told = alone(engine)
    assert len({tuple(tokens) for tokens, *_ in told}) == len(ASKED)
    return told


def invariant_engine(model: str, device: Device, **options: Any) -> Any:
    given = {"load_format": "dummy", "max_num_seqs": MAX_NUM_SEQS, "step_tokens": STEP_TOKENS, **options}
    return device_engine(model, device=device, batch_invariant=True, **given)


def told(core: EngineCore, rids: Sequence[int]) -> Told:
    return [(core.outputs[rid], core.logprobs[rid], core.prompt_logprobs.get(rid)) for rid in rids]


def ask(core: EngineCore, first: int = 0) -> list[int]:
    rids = list(range(first, first + len(ASKED)))
    for rid, params in zip(rids, ASKED.values(), strict=True):
        core.add_request(rid, PROMPT, params)
    return rids


def alone(engine: DeviceEngine) -> Told:
    """One after the other, nothing cached."""
    core = engine.core(enable_prefix_caching=False)
    for rid, params in enumerate(ASKED.values()):
        core.add_request(rid, PROMPT, params)
        core.run()
    return told(core, range(len(ASKED)))


@pytest.mark.parametrize(
    ("together", "others"), [(["greedy"], 1), (["seeded", "scored"], 0), ([*ASKED], 4), ([*ASKED], 28)]
)
def test_a_request_says_the_same_beside_1_7_and_31_others(
    engine: DeviceEngine, expected: Told, together: list[str], others: int
) -> None:
    core = engine.core(enable_prefix_caching=False, check=False)
    lengths = np.random.default_rng(others).integers(1, 120, others).tolist()
    asked = list(ASKED)
    for rid, prompt in enumerate(random_prompts(lengths, VOCAB_SIZE, seed=others)):
        core.add_request(100 + rid, prompt, OTHERS[rid % len(OTHERS)])
        if rid % 3 == 2:
            core.turn()
        if rid == others // 2:
            for name in together:
                core.add_request(asked.index(name), PROMPT, ASKED[name])
    if not others:
        for name in together:
            core.add_request(asked.index(name), PROMPT, ASKED[name])
    core.run()
    rids = [asked.index(name) for name in together]
    assert told(core, rids) == [expected[rid] for rid in rids]


def test_a_request_says_the_same_in_chunks_of_any_size(engine: DeviceEngine, expected: Told) -> None:
    for step_tokens in (32, 40, 48, 112):
        assert told_of_all(core_of(engine, max_num_batched_tokens=step_tokens)) == expected


def core_of(engine: DeviceEngine, **changes: Any) -> EngineCore:
    """Of less than the executor has, and caching nothing."""
    executor = engine.executor
    sizes: dict[str, Any] = {"num_pages": executor.num_pages, "max_num_batched_tokens": executor.max_step_tokens}
    sizes |= {"max_num_seqs": engine.max_num_seqs, **changes}
    return EngineCore(
        max_model_len=executor.max_model_len,
        vocab_size=executor.model_config.vocab_size,
        eos_ids=executor.model_config.eos_ids,
        device=executor,
        enable_prefix_caching=False,
        **sizes,
    )


def told_of_all(core: EngineCore) -> Told:
    rids = ask(core)
    core.run()
    return told(core, rids)


@pytest.mark.parametrize("cached", [15, 16, 40, 74])
def test_a_request_says_the_same_if_its_prefix_was_cached(engine: DeviceEngine, expected: Told, cached: int) -> None:
    core = engine.core()
    core.add_request(100, PROMPT[:cached], OTHERS[0])
    core.run()
    rids = ask(core)
    core.run()
    assert told(core, rids) == expected
    assert core.scheduler.counters.prefix_hit_tokens >= cached // 16 * 16


def test_a_request_says_the_same_after_it_was_retracted(engine: DeviceEngine, expected: Told) -> None:
    pages_of_a_row = -(-(len(PROMPT) + NUM_TOKENS) // 16)
    core = core_of(engine, num_pages=1 + len(ASKED) * pages_of_a_row - 3)
    assert told_of_all(core) == expected
    assert core.scheduler.counters.preemptions > 0


def test_a_request_that_is_taken_up_elsewhere_goes_on_with_the_same(engine: DeviceEngine, expected: Told) -> None:
    core, rest = engine.core(), engine.core(enable_prefix_caching=False)
    rids = ask(core)
    while min(len(core.outputs.get(rid, [])) for rid in rids) < 7:
        core.turn()
    for rid in rids:
        core.abort(rid)
    core.run()
    for rid in rids:
        rest.resume(rid, {rid: 7}, of=core)
        rest.run()
    for rid, (tokens, logprobs, _) in zip(rids, expected, strict=True):
        assert rest.outputs[rid] == tokens
        assert core.logprobs[rid][:7] + rest.logprobs[rid] == logprobs


@pytest.mark.parametrize(("dtype", "max_gap"), [("float32", 1e-3), ("float16", 0.02), ("bfloat16", 0.05)])
def test_it_computes_what_it_should_in_every_number_type(
    device: Device, dtype: DType, max_gap: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    with invariant_engine(model, device, dtype=dtype, max_num_seqs=8) as engine:
        together = told_of_all(core_of(engine))
        assert together == alone(engine)
    reference = ReferenceLogits(model, dtype=getattr(torch, dtype), device=torch.device(device))
    (tokens, logprobs, _), *_ = together
    assert reference.gaps(PROMPT, tokens).max() < max_gap
    logits = reference([*PROMPT.tolist(), *tokens])[len(PROMPT) - 1 : -1]
    exact = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert [chosen for chosen, _ in logprobs] == pytest.approx(exact.tolist(), abs=max_gap)


def test_the_same_engine_built_again_says_the_same(device: Device, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    answers = []
    for slots in (8, 5):
        with invariant_engine(model, device, max_num_seqs=slots) as engine:
            assert engine.executor.info.batch_invariant
            answers.append(told_of_all(engine.core()))
    assert answers[0] == answers[1]
