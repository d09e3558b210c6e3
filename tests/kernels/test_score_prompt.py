"""Scores of prompts' tokens: the kernels against the torch reference, from a plan to the host's buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncengine.config import MAX_TOP_LOGPROBS
from gpu_runner.kernels import reference_adjust
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.host_ring import HostRing, deliver_scores
from gpu_runner.kernels.result_layout import Scores, score_words
from gpu_runner.kernels.sample import Tiling
from gpu_runner.kernels.sample_full import FullSampling
from gpu_runner.kernels.score_prompt import PromptScorer
from gpu_runner.kernels.upload_layout import SCORE_WORDS, TURN_WORD, count_word, offset_word

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 1000
MAX_ROWS = 5
POISON = -7
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make_logits(rows: int) -> Tensor:
    """With ties, and numbers that are none."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)).mul(4).round(decimals=1)
    logits[0, 10], logits[0, 11], logits[0, 12] = math.nan, math.inf, -math.inf
    return logits


def plan_of(scores: np.ndarray, first: int = 50) -> Tensor:
    plan = torch.full((100,), POISON, dtype=torch.int32)
    plan[count_word("num_scores")], plan[offset_word("scores")], plan[TURN_WORD] = len(scores), first, 0
    plan[first : first + scores.size] = torch.from_numpy(scores.reshape(-1))
    return plan.to(DEVICE)


def scorer() -> PromptScorer:
    state = DeviceState(num_slots=3, pages_per_seq=2, device=DEVICE)
    for tensor in (state.bias_ids, state.page_table, state.logprobs):
        tensor.fill_(2**30)
    tiling = Tiling(block=128, num_warps=4, stages=1, programs=24)
    full = FullSampling(max_rows=MAX_ROWS, vocab=VOCAB, device=DEVICE, tiling=tiling)
    return PromptScorer(full, state, max_rows=MAX_ROWS)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_scores_are_those_of_the_reference(count: int) -> None:
    rows, logits = 4, make_logits(4)
    wanted = [20, 0, 1, 7][:count]
    best = logits[3].argmax().item()
    targets = [12, 10, 3, best][:count]
    scores = np.array([[90 + row, targets[row], wanted[row]] for row in range(count)], np.int32).reshape(
        -1, SCORE_WORDS
    )
    host, num_slots = torch.full((9 + score_words(6),), POISON, dtype=torch.int32, pin_memory=DEVICE.type == "cuda"), 6
    ring = HostRing.allocate(1, DEVICE)
    ring.connect([(torch.empty(4, dtype=torch.int32, pin_memory=DEVICE.type == "cuda"), host)])
    turn = ring.next_upload.clone()
    under_test = scorer()
    vector = torch.full((score_words(num_slots),), POISON, dtype=torch.int32, device=DEVICE)
    page_tokens = torch.full((2, 16), 2**30, dtype=torch.int32, device=DEVICE)
    inputs = plan_of(scores)
    for plan in (plan_of(np.full((MAX_ROWS, SCORE_WORDS), 3, np.int32)), inputs):  # what one leaves, the next replaces
        token = under_test.unpack(plan, rows if plan is inputs else MAX_ROWS)
    assert token.tolist() == [*range(90, 90 + count), *[0] * (rows - count)]
    under_test.score(logits.to(DEVICE), page_tokens, Scores.of(vector))
    deliver_scores(ring, inputs, vector, first_word=9)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert (host[:9] == POISON).all()
    assert torch.equal(host[9:], vector.cpu())
    assert torch.equal(ring.next_upload, turn)
    got = Scores.of(host[9:])
    own = logits[:count]
    target = torch.tensor(targets, dtype=torch.int64)
    expected = reference_adjust.top_logprobs(own, target, torch.tensor(wanted), most=MAX_TOP_LOGPROBS)
    torch.testing.assert_close(got.logprobs[:count], expected.chosen, atol=1e-5, rtol=1e-6)
    assert got.num_tops[:count].tolist() == wanted
    assert got.ranks[:count].tolist() == reference_adjust.ranks(own, target).tolist()
    for row in range(count):
        assert torch.equal(got.top_ids[row, : wanted[row]], expected.ids[row, : wanted[row]])
        torch.testing.assert_close(
            got.top_logprobs[row, : wanted[row]], expected.values[row, : wanted[row]], atol=1e-5, rtol=1e-6
        )
        assert (got.top_ids[row, wanted[row] :] == POISON).all()
    for part in (got.num_tops, got.ranks, got.top_ids, got.logprobs.view(torch.int32)):
        assert (part[count:] == POISON).all()


def test_a_rank_counts_what_is_likelier_or_as_likely_with_a_smaller_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, math.nan, 2.0, -math.inf, 3.0]])
    ranks = [int(reference_adjust.ranks(logits, torch.tensor([id]))[0]) for id in range(7)]
    assert ranks == [5, 1, 2, 6, 4, 7, 3]
