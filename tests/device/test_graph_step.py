"""The GPU's captured graphs against the reference operations, over the same random weights."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from asyncengine.config import PAGE_SIZE, EngineConfig
from asyncengine.sampling import SamplingParams
from gpu_runner.device.build import build_executor
from gpu_runner.device.executor import Executor
from gpu_runner.kernels.host_ring import HostRing
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.models.registry import random_model
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.scheduler import Scheduler, num_slots_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

VOCAB = 1000
MAX_NUM_SEQS = 6
STEP_TOKENS = 48
TOLERANCE = 0.04
"""Of a logit, whose deviation is about 0.3: what bfloat16 sums of another order come to."""
SLEEP_CYCLES = 400_000_000
"""Some tenths of a second, in which a step would long have run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def executor(folder: str) -> Executor:
    return build(folder)


def build(folder: str) -> Executor:
    config = EngineConfig(
        load_format="dummy",
        device="cuda",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_tokens=4096,
    )
    return build_executor(config, folder, lambda *_: None, num_slots=num_slots_for(MAX_NUM_SEQS))


def run(
    executor: Executor, prompts: list[np.ndarray], params: list[SamplingParams], *, caching: bool = True
) -> list[list[int]]:
    """Outputs of prompts that arrive together."""
    scheduler = Scheduler(
        num_pages=executor.num_pages,
        max_model_len=executor.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=executor.max_step_tokens,
        enable_prefix_caching=caching,
    )
    for rid, (prompt, request) in enumerate(zip(prompts, params, strict=True)):
        assert request.max_tokens is not None
        scheduler.add(rid=rid, prompt=prompt, params=request, max_tokens=request.max_tokens)
    outputs: dict[int, list[int]] = {rid: [] for rid in range(len(prompts))}
    rid_of: dict[tuple[int, int], int] = {}
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        plan = scheduler.plan()
        if plan is not None:
            executor.launch(plan)
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == 2):
            output = scheduler.commit(in_flight.popleft(), executor.collect())
            rid_of.update({(row.slot, row.gen): row.rid for row in output.opens})
            for slot, gen, token in zip(output.slots, output.gens, output.tokens, strict=True):
                outputs[rid_of[int(slot), int(gen)]].append(int(token))
    scheduler.check_integrity()
    return list(outputs.values())


def make_prompts(lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(2, VOCAB, length, dtype=np.int32) for length in lengths]


@torch.inference_mode()
def reference_logits(folder: str, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), VOCAB] of the same weights, every position computed at once by the reference operations."""
    device = torch.device("cuda", 0)
    decoder = random_model(folder, device=device, dtype=torch.bfloat16)
    model, length = decoder.config, len(tokens)
    pages = -(-length // PAGE_SIZE)
    meta = BatchMeta(
        num_decode_rows=0,
        row_start=np.zeros(1, np.int32),
        row_len=np.full(1, length, np.int32),
        row_slot=torch.zeros(1, dtype=torch.int64, device=device),
        positions=torch.arange(length, device=device),
        kv_index=torch.arange(length, device=device),
        page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
    )
    shape = (model.num_layers, 2, pages, model.num_kv_heads, PAGE_SIZE, model.head_dim)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    return decoder.logits(decoder.forward(torch.tensor(tokens, device=device), meta, cache))


def test_greedy_tokens_are_the_references_best_whatever_the_steps_mix(executor: Executor, folder: str) -> None:
    prompts = make_prompts([1, 5, 16, 17, 100, 130])
    greedy = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * len(prompts)
    for prompt, output in zip(prompts, run(executor, prompts, greedy), strict=True):
        assert len(output) == 24
        logits = reference_logits(folder, [*prompt.tolist(), *output])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < TOLERANCE


def test_tokens_stop_at_stop_ids_and_limits_and_slots_are_used_again(executor: Executor) -> None:
    prompts = make_prompts([9] * 20)
    params = [SamplingParams(temperature=0.0, max_tokens=1 + rid, ignore_eos=True) for rid in range(20)]
    outputs = run(executor, prompts, params)
    assert [len(output) for output in outputs] == [1 + rid for rid in range(20)]
    stop = outputs[19][4]
    first = outputs[19].index(stop)
    (stopped,) = run(
        executor, prompts[19:], [SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(stop,))], caching=False
    )
    assert stopped == outputs[19][: first + 1]


def test_the_first_step_waits_for_where_its_plan_lies(
    executor: Executor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_late(ring: HostRing, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        connect(ring, buffers)
        ring.next_upload.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        ring.next_upload.copy_(ring.uploads[:1])

    connect = HostRing.connect
    monkeypatch.setattr(HostRing, "connect", connect_late)
    prompts = make_prompts([9, 60])
    greedy = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * len(prompts)
    late = build(folder)
    outputs = run(late, prompts, greedy)
    late.close()
    assert outputs == run(executor, prompts, greedy)


def test_seeded_tokens_are_the_same_alone_and_among_others(executor: Executor) -> None:
    prompts = make_prompts([12, 30, 7, 50])
    params = [
        SamplingParams(temperature=1.0, max_tokens=16, seed=3, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, max_tokens=16, seed=4, ignore_eos=True),
        SamplingParams(temperature=1.2, top_p=0.7, min_p=0.01, max_tokens=16, seed=5, ignore_eos=True),
        SamplingParams(temperature=1.0, min_tokens=8, max_tokens=16, seed=6),
    ]
    together = run(executor, prompts, params)
    alone = [run(executor, [prompt], [request])[0] for prompt, request in zip(prompts, params, strict=True)]
    # bfloat16 products of other batch sizes differ in the last bits, which may move a token here and there
    same = [sum(a == b for a, b in zip(x, y, strict=False)) / len(x) for x, y in zip(together, alone, strict=True)]
    assert np.mean(same) > 0.8
    assert together == run(executor, prompts, params)


def test_the_device_times_steps_one_after_the_other_and_within_the_hosts_time(executor: Executor) -> None:
    scheduler = Scheduler(
        num_pages=executor.num_pages,
        max_model_len=executor.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=executor.max_step_tokens,
    )
    for rid, prompt in enumerate(make_prompts([7, 40])):
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=30)
    spans: list[tuple[int, int]] = []
    in_flight: deque[StepPlan] = deque()
    begin = time.monotonic_ns()
    while scheduler.has_work or in_flight:
        plan = scheduler.plan()
        if plan is not None:
            executor.launch(plan)
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == 2):
            result = executor.collect()
            spans.append((result.device_begin_ns, result.device_end_ns))
            scheduler.commit(in_flight.popleft(), result)
    host_ns = time.monotonic_ns() - begin
    borders = [time for span in spans for time in span]
    assert len(spans) >= 30
    assert borders[0] > 0
    assert borders == sorted(borders)
    assert 0 < sum(end - begin for begin, end in spans) <= borders[-1] - borders[0] <= host_ns
