"""Masks of structured output: the kernel against the torch reference, the reference against loops over the bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.kernels import reference_adjust
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.mask_layout import mask_words
from gpu_runner.kernels.sample import Sampler
from gpu_runner.kernels.step_meta import StepMeta, new_step_meta
from gpu_runner.kernels.token_mask import BLOCK, FETCH_BLOCK, RowMasks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Floats that overflow to infinity are meant; only the interpreter warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCABS = [1, 31, 32, 33, 1000, BLOCK, BLOCK + 1, 2 * BLOCK + 77, 32 * FETCH_BLOCK + 1]


class MaskStep:
    """A step of `count` samples in shuffled rows and slots; every third row is constrained, one has ended before."""

    def __init__(self, count: int, vocab: int, *, padding: int = 2, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        size = count + padding
        self.count, self.vocab = count, vocab
        self.state = DeviceState(num_slots=size + 3, pages_per_seq=1, device=DEVICE)
        self.state.constrained.fill_(1)
        self.state.top_p.fill_(1.0)
        self.meta: StepMeta = new_step_meta(max_rows=size, max_tokens=1, device=DEVICE)
        for tensor in (self.meta.row_slot, self.meta.sample_row, self.meta.row_was_done):
            tensor.fill_(-(2**20))
        self.meta.counts[3] = count
        rows, self.slots = generator.permutation(size)[:count], generator.permutation(size + 3)[:count]
        self.meta.sample_row[:count] = torch.from_numpy(rows).to(DEVICE)
        self.meta.row_slot[rows] = torch.from_numpy(self.slots.astype(np.int32)).to(DEVICE)
        done = np.arange(count) == 4
        self.meta.row_was_done[rows] = torch.from_numpy(done.astype(np.int32)).to(DEVICE)
        constrained = np.arange(count) % 3 != 1
        self.state.constrained[self.slots] = torch.from_numpy(constrained.astype(np.int32)).to(DEVICE)
        self.masks = TokenMasks(num_slots=size + 3, vocab=vocab, pinned=DEVICE.type == "cuda")
        self.masks.array[:] = generator.integers(-(2**31), 2**31, self.masks.array.shape)
        self.kernels = RowMasks(max_rows=size, vocab=vocab, device=DEVICE)
        self.kernels._words.fill_(0x55555555)
        self.kernels.connect(self.masks.tensor)
        self.applies = torch.from_numpy(constrained & ~done)

    def expected(self, logits: Tensor) -> Tensor:
        return reference_adjust.mask(logits, self.masks.tensor[torch.from_numpy(self.slots)], self.applies)

    def run(self, logits: Tensor) -> None:
        self.kernels.apply(logits, self.state, self.meta)


def padded(logits: Tensor, step: MaskStep) -> Tensor:
    whole = torch.full((len(step.meta.sample_row), step.vocab), math.nan, device=DEVICE)
    whole[: len(logits)] = logits.to(DEVICE)
    return whole


def test_the_reference_bans_what_has_no_bit() -> None:
    masks = torch.tensor([[0b101, -(2**31)], [0, 0]], dtype=torch.int32)
    masked = reference_adjust.mask(torch.zeros(2, 64), masks, torch.tensor([True, False]))
    assert torch.isfinite(masked[0]).nonzero().flatten().tolist() == [0, 2, 63]
    assert (masked[1] == 0).all()


def test_masks_have_a_bit_for_every_id_and_multiples_of_16_words() -> None:
    assert [mask_words(vocab) for vocab in (1, 512, 513, 49152, 151936)] == [16, 16, 32, 1536, 4752]


@pytest.mark.parametrize("vocab", VOCABS)
def test_constrained_rows_keep_what_their_slots_mask_has_and_others_everything(vocab: int) -> None:
    step = MaskStep(7, vocab, seed=vocab)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    masked = padded(logits, step)
    step.run(masked)
    assert torch.equal(masked[:7].cpu(), step.expected(logits))
    assert masked[7:].isnan().all(), "what is no sample is not touched"


def test_a_step_of_nothing_touches_nothing() -> None:
    step = MaskStep(0, 100)
    logits = padded(torch.zeros(0, 100), step)
    step.run(logits)
    assert logits.isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_one_token_that_a_mask_leaves_is_drawn(temperature: float) -> None:
    step = MaskStep(6, 1000)
    step.masks.array[:] = 0
    for slot in step.slots:
        step.masks.array[slot, slot % 31] = np.int32(1) << (slot % 30)
    step.state.temperature.fill_(temperature)
    logits = padded(torch.randn(6, 1000), step)
    step.run(logits)
    out = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
    sampler = Sampler(max_rows=len(logits), vocab=1000, device=DEVICE)
    sampler.sample(logits, step.state, step.meta, out, filtered=True, bans_stop_ids=False)
    for index, slot in enumerate(step.slots.tolist()):
        if step.applies[index]:
            assert int(out[index]) == 32 * (slot % 31) + slot % 30


def test_masks_of_another_vocabulary_are_refused() -> None:
    step = MaskStep(1, 100)
    with pytest.raises(ValueError, match="masks must have 16 words; got 8"):
        step.kernels.connect(torch.zeros(3, 8, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (256, 151936)])
def test_replayed_graphs_see_the_masks_that_the_host_wrote_since(rows: int, vocab: int) -> None:
    step = MaskStep(rows, vocab, padding=0)
    logits = torch.zeros(rows, vocab, device=DEVICE)
    step.run(logits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(logits)
    generator = np.random.default_rng(1)
    for _ in range(5):
        step.masks.array[:] = generator.integers(-(2**31), 2**31, step.masks.array.shape)
        logits.zero_()
        graph.replay()
        assert torch.equal(logits.cpu(), step.expected(torch.zeros(rows, vocab)))
