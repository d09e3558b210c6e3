"""Which graphs a step replays, without a GPU: the graphs are replaced by notes of their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_harness import Prefill, Rig
from support.random_model import write_config

from asyncengine.config import PAGE_SIZE
from gpu_runner.device.buffers import PackedStep
from gpu_runner.device.graph_step import GraphStep, Uncaptured
from gpu_runner.device.memory import allocate_kv_cache
from gpu_runner.device.sampling_path import SamplingPath
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.registry import random_model
from gpu_runner.schedule.buckets import bucket_for, token_buckets

CPU = torch.device("cpu")
STEP_TOKENS = 256
GREEDY = SamplingPath(greedy=True, filtered=False, bans_stop_ids=False)
SAMPLE = SamplingPath(greedy=False, filtered=False, bans_stop_ids=False)
FILTERED = SamplingPath(greedy=False, filtered=True, bans_stop_ids=False)
FULL = SamplingPath(greedy=True, filtered=False, bans_stop_ids=False, logprobs=True)


class Notes:
    """A step of which only the choice of graphs runs; `replayed` lists what a real one would replay.

    capacity: tokens of a row. changes: of the model's config.
    """

    def __init__(self, folder: Path, max_rows: int, *, capacity: int = PAGE_SIZE, **changes: Any) -> None:
        shape = {
            "vocab_size": 60,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        }
        model = write_config(folder, **shape | changes)
        pages = capacity // PAGE_SIZE
        decoder = random_model(model, device=CPU, dtype=torch.float32, ops=CudaOps())
        self.step = GraphStep(
            decoder=decoder,
            model=decoder.config,
            kv_cache=allocate_kv_cache(decoder.config, 2, torch.float32, CPU),
            state=DeviceState(num_slots=max_rows, pages_per_seq=pages, device=CPU),
            max_rows=max_rows,
            max_step_tokens=STEP_TOKENS,
            upload_words=upload_words(num_slots=max_rows, pages_per_seq=pages, max_step_tokens=STEP_TOKENS),
            dtype=torch.float32,
            graphs=False,
        )
        self.rig = Rig(executor=None, kv_cache=torch.empty(0), decoder=None, device=CPU)  # type: ignore[arg-type]
        self.replayed: list[str] = []
        for kind in self.step.works():
            for work, keep in kind:
                keep(Uncaptured(partial(self._note, work)))

    def _note(self, work: Callable[[], None]) -> None:
        """Its name is that of the method that makes the work, with a word for the kernels of long contexts."""
        long = getclosurevars(work).nonlocals.get("phase") == "long decode"
        self.replayed.append(work.__qualname__.split(".")[1] + " long" * long)

    def run(
        self, path: SamplingPath, *, decode: int, prefill: int, samples: int, scores: int = 0, context: int = 0
    ) -> list[str]:
        """context: tokens in the cache of the rows that decode, all together."""
        self.replayed.clear()
        plan = self.rig.plan(
            decode=[(slot, (context + slot) // decode) for slot in range(decode)],
            prefill=[Prefill(decode, 0, [1] * prefill)] if prefill else [],
        )._replace(scores=np.zeros((scores, 3), np.int32))
        assert plan.bucket == bucket_for(token_buckets(STEP_TOKENS), decode + prefill)
        self.step.run(PackedStep(turn=0, words=0, result_words=0, path=path, num_samples=samples, plan=plan))
        return list(self.replayed)


TWO = ["_forward_work", "_finish_work"]
ONE = ["_decode_work"]


@pytest.mark.parametrize("max_rows", [1, 5, 200])
def test_steps_whose_rows_all_decode_are_one_graph(tmp_path: Path, max_rows: int) -> None:
    notes = Notes(tmp_path, max_rows)
    for rows in {1, 2, 5, 64, 200} & set(range(max_rows + 1)):
        for path in (GREEDY, SAMPLE):
            assert notes.run(path, decode=rows, prefill=0, samples=rows) == ONE
        for path in (FILTERED, FULL):
            assert notes.run(path, decode=rows, prefill=0, samples=rows) == TWO


def test_steps_with_prefill_are_two_graphs(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 8)
    assert notes.run(GREEDY, decode=0, prefill=1, samples=1) == TWO
    assert notes.run(GREEDY, decode=3, prefill=1, samples=4) == TWO
    assert notes.run(GREEDY, decode=3, prefill=5, samples=3) == TWO
    assert notes.run(GREEDY, decode=0, prefill=5, samples=0) == TWO


def test_steps_that_score_tokens_of_prompts_have_a_graph_more(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 8)
    for scores, samples in ((1, 0), (8, 4)):
        replayed = notes.run(FULL, decode=3, prefill=9, samples=samples, scores=scores)
        assert replayed == ["_forward_work", "_score_work", "_finish_work"]


# ------------------------------------------------------------------------------------------------------- long contexts

TOKEN_BYTES = 2 * 32 * 4
"""Of keys and values."""
CAPACITY = 1 << 17
TWO_LONG, ONE_LONG = ["_forward_work long", "_finish_work"], ["_decode_work long"]


@pytest.mark.parametrize(
    ("rows", "long_bytes"),
    [
        *((1, 3_000_000), (2, 3_000_000), (3, 6_000_000), (4, 6_000_000)),
        *((5, 40_000_000), (16, 40_000_000), (17, 65_000_000), (32, 65_000_000)),
    ],
)
def test_some_rows_have_graphs_of_their_own_from_so_many_bytes_of_context_on(
    tmp_path: Path, rows: int, long_bytes: int
) -> None:
    notes = Notes(tmp_path, 32, capacity=CAPACITY)
    least = -(-long_bytes // TOKEN_BYTES)
    for path, usual, long in ((GREEDY, ONE, ONE_LONG), (SAMPLE, ONE, ONE_LONG), (FULL, TWO, TWO_LONG)):
        assert notes.run(path, decode=rows, prefill=0, samples=rows, context=least - 1) == usual
        assert notes.run(path, decode=rows, prefill=0, samples=rows, context=least) == long
    assert notes.run(GREEDY, decode=rows, prefill=0, samples=rows - 1, context=least) == TWO_LONG
    assert notes.run(GREEDY, decode=rows, prefill=1, samples=rows, context=least) == TWO


def test_many_rows_have_the_same_graphs_for_any_context(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 40, capacity=CAPACITY)
    assert notes.run(GREEDY, decode=33, prefill=0, samples=33, context=33 * CAPACITY) == ONE


@pytest.mark.parametrize(
    ("capacity", "changes"),
    [
        (CAPACITY, {"head_dim": 16}),  # is not fused
        (CAPACITY, {"architectures": ["MistralForCausalLM"], "sliding_window": 64}),
        (4096, {}),  # which 32 rows cannot exceed
    ],
    ids=["not fused", "windows", "short"],
)
def test_other_engines_have_none(tmp_path: Path, capacity: int, changes: dict[str, Any]) -> None:
    notes = Notes(tmp_path, 32, capacity=capacity, **changes)
    assert notes.run(GREEDY, decode=32, prefill=0, samples=32, context=32 * CAPACITY) == ONE
    usual = Notes(tmp_path, 32)
    assert [len(kind) for kind in notes.step.works()] == [len(kind) for kind in usual.step.works()]
