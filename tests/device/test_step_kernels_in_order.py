"""The GPU's step without a GPU: its kernels, one by one under the interpreter, give the plain step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_core import EngineCore
from support.long_steps import make_long_from
from support.random_model import write_config
from torch import Tensor

from asyncengine.sampling import SamplingParams, Structured
from asyncengine.wire.reports import RunnerInfo
from gpu_runner.device import graph_step
from gpu_runner.device.buffers import pages_for
from gpu_runner.device.executor import Executor, StepRunner
from gpu_runner.device.graph_step import GraphStep
from gpu_runner.device.memory import allocate_kv_cache
from gpu_runner.device.step import Step
from gpu_runner.device.target import make_stream
from gpu_runner.kernels.cuda_ops import CudaMeta, CudaOps
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.head_config import HeadConfig
from gpu_runner.kernels.linear_config import DotConfig, LinearConfig, choose
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.registry import random_model

CPU = torch.device("cpu")
ROWS, STEP_TOKENS, CONTEXT, NUM_PAGES, VOCAB = 2, 16, 48, 12, 60
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=2, seed=3, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.8, max_tokens=2, seed=4, ignore_eos=True),
    SamplingParams(
        temperature=1.0,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias=((7, 4.0), (59, 3.0)),
        logprobs=3,
        prompt_logprobs=2,
        max_tokens=3,
        ignore_eos=True,
    ),
    SamplingParams(temperature=1.5, top_k=30, seed=6, max_tokens=3, structured=Structured("regex", "x*")),
]
MASKED = 4
"""The last, which gets even ids."""
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (19, 1, 6, 5, 3)]


TENSOR_CORES = DotConfig(rows=16, block_k=32, stages=2, num_warps=2)


def on_tensor_cores(x: Tensor, weight: Tensor) -> LinearConfig | None:
    """Of three tokens and more: so their norms are parts of the kernels around them."""
    return TENSOR_CORES if len(x) > 2 else choose(len(x), *weight.shape)


def executor(model: str, ops: CudaOps | None) -> Executor:
    """Of `GraphStep` that captures nothing, or of `Step`."""
    decoder = random_model(model, device=CPU, dtype=torch.float32, ops=ops)
    kv_cache = allocate_kv_cache(decoder.config, NUM_PAGES, torch.float32, CPU)
    num_slots, pages_per_seq = 2 * ROWS, pages_for(CONTEXT)
    state = DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=CPU)
    words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=STEP_TOKENS)
    step: StepRunner
    if ops is not None:
        step = uncaptured = GraphStep(
            decoder=decoder,
            model=decoder.config,
            kv_cache=kv_cache,
            state=state,
            max_rows=ROWS,
            max_step_tokens=STEP_TOKENS,
            upload_words=words,
            dtype=torch.float32,
            graphs=False,
        )
        uncaptured.capture(lambda done, total: None)
    else:
        step = Step(decoder=decoder, kv_cache=kv_cache, state=state, max_step_tokens=STEP_TOKENS, upload_words=words)
    info = RunnerInfo(
        device="cpu",
        dtype="float32",
        architecture=decoder.config.architecture,
        vocab_size=VOCAB,
        max_model_len=CONTEXT,
        num_pages=NUM_PAGES,
        weight_bytes=0,
        kv_cache_bytes=0,
    )
    return Executor(
        step=step,
        model_config=decoder.config,
        stream=make_stream(CPU),
        info=info,
        num_slots=num_slots,
        pages_per_seq=pages_per_seq,
        max_step_tokens=STEP_TOKENS,
        pinned=False,
    )


def run(
    model: str,
    ops: CudaOps | None,
    prompts: Sequence[np.ndarray] = PROMPTS,
    params: Sequence[SamplingParams] = PARAMS,
) -> EngineCore:
    device = executor(model, ops)
    device.masks.array.fill(0x55555555)
    core = EngineCore(
        num_pages=NUM_PAGES,
        max_model_len=CONTEXT,
        max_num_seqs=ROWS,
        max_num_batched_tokens=STEP_TOKENS,
        vocab_size=VOCAB,
        device=device,
    )
    for rid, (prompt, request) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(rid, prompt, request)
    core.run()
    core.assert_nothing_held()
    device.close()
    return core


def small_model(folder: Path, *, head_dim: int) -> str:
    return write_config(
        folder, vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim,
    )  # fmt: skip


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels take tensors of the GPU here")


@without_gpu
@pytest.mark.parametrize(
    ("head", "ops"),
    [
        (None, CudaOps()),
        (HeadConfig(16, 32, 32, stages=2, num_warps=4), CudaOps()),
        (None, CudaOps(choose=on_tensor_cores)),
    ],
    ids=["logits", "head", "folded norms"],
)
def test_kernels_one_by_one_give_the_plain_steps_tokens(
    tmp_path: Path, head: HeadConfig | None, ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_step, "choose_head", lambda *shape: head)
    model = small_model(tmp_path, head_dim=16)
    kernels, plain = run(model, ops), run(model, None)
    assert kernels.outputs == plain.outputs
    assert [token % 2 for token in kernels.outputs[MASKED]] == [0] * 3
    assert list(kernels.logprobs) == list(plain.logprobs) == [3]
    for (chosen, tops), (same, same_tops) in zip(kernels.logprobs[3], plain.logprobs[3], strict=True):
        assert list(tops) == list(same_tops)
        assert [chosen, *tops.values()] == pytest.approx([same, *same_tops.values()], abs=1e-4)
    assert list(kernels.prompt_logprobs) == list(plain.prompt_logprobs) == [3]
    scored, same_scored = kernels.prompt_logprobs[3], plain.prompt_logprobs[3]
    assert (scored.item_ends, scored.ids, scored.ranks) == (same_scored.item_ends, same_scored.ids, same_scored.ranks)
    values, same_values = (np.frombuffer(both.logprobs, np.float32) for both in (scored, same_scored))
    np.testing.assert_allclose(values, same_values, atol=1e-4)
    assert np.isnan(values).nonzero()[0].tolist() == [0]


@without_gpu
def test_rows_whose_contexts_become_long_while_they_decode_get_the_plain_steps_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_bytes = 2 * 32 * 4
    make_long_from(monkeypatch, 13 * token_bytes)
    kernels_of_steps = []

    def note(**meta: Any) -> CudaMeta:
        if not meta["prefill"]:
            way = meta["way"]
            kernels_of_steps.append("streamed" if way.streams else "fused" if way.fused_warps else "pair")
        return CudaMeta(**meta)

    monkeypatch.setattr(graph_step, "CudaMeta", note)
    model = small_model(tmp_path, head_dim=32)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 6)]
    params = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)] * 2
    kernels, plain = run(model, CudaOps(), prompts, params), run(model, None, prompts, params)
    assert kernels_of_steps == ["fused", "streamed", "streamed"]  # with 11, 13 and 15 tokens in the cache
    assert kernels.outputs == plain.outputs
