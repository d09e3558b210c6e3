"""Plans and results through the host's own memory, in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_runner.kernels.host_ring import BLOCK, MAX_PROGRAMS, HostRing, deliver, fetch
from gpu_runner.kernels.upload_layout import HEADER_WORDS, RESULT_WORDS_WORD, TURN_WORD, USED_WORDS_WORD

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEPTH = 3
POISON = -7


def on_host(words: int) -> Tensor:
    return torch.full((words,), POISON, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")


class Ring:
    """A ring of host buffers, and the device's side of it."""

    def __init__(self, upload_words: int, result_words: int) -> None:
        self.uploads = [on_host(upload_words) for _ in range(DEPTH)]
        self.results = [on_host(result_words) for _ in range(DEPTH)]
        self.device = HostRing.allocate(DEPTH, DEVICE)
        self.inputs = torch.zeros(upload_words, dtype=torch.int32, device=DEVICE)

    def connect(self) -> None:
        self.device.connect(list(zip(self.uploads, self.results, strict=True)))

    def write(self, turn: int, used: int, result_words: int, seed: int) -> Tensor:
        """A plan of random words into the buffer of that turn; returns its used part."""
        upload = self.uploads[turn]
        upload.fill_(POISON)
        upload[:used] = torch.from_numpy(np.random.default_rng(seed).integers(0, 1000, used).astype(np.int32))
        upload[USED_WORDS_WORD], upload[RESULT_WORDS_WORD], upload[TURN_WORD] = used, result_words, turn
        return upload[:used].clone()

    def step(self, results: Tensor, num_tokens: int) -> None:
        fetch(self.device, self.inputs, num_tokens=num_tokens)
        deliver(self.device, self.inputs, results)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


@pytest.mark.parametrize("num_tokens", [1, 2048])
def test_steps_take_the_buffers_in_turn_and_as_many_words_as_each_has(num_tokens: int) -> None:
    size = BLOCK * (MAX_PROGRAMS + 2) + 5
    ring = Ring(size, 2 * BLOCK + 3)
    ring.connect()
    lengths = [HEADER_WORDS, BLOCK, BLOCK + 1, 3 * BLOCK - 1, size]
    wanted = [0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]
    for index, (used, words) in enumerate(zip(lengths, wanted, strict=True)):
        turn = index % DEPTH
        plan = ring.write(turn, used, words, seed=index)
        for results in ring.results:
            results.fill_(POISON)
        results = torch.arange(2 * BLOCK + 3, dtype=torch.int32, device=DEVICE) + index
        ring.step(results, num_tokens)
        assert torch.equal(ring.inputs[:used].cpu(), plan)
        assert torch.equal(ring.results[turn][:words], results[:words].cpu())
        assert (ring.results[turn][words:] == POISON).all()
        for other in range(DEPTH):
            assert other == turn or (ring.results[other] == POISON).all()
        assert ring.device.next_upload.item() == ring.uploads[(turn + 1) % DEPTH].data_ptr()


def test_before_the_ring_is_connected_nothing_is_read_or_written_and_no_turn_passes() -> None:
    ring = Ring(64, 8)
    ring.write(0, 64, 8, seed=0)
    results = torch.ones(8, dtype=torch.int32, device=DEVICE)
    ring.step(results, 1)
    assert not ring.inputs.any()
    assert all((host == POISON).all() for host in ring.results)
    ring.connect()
    plan = ring.write(0, 64, 8, seed=1)
    ring.step(results, 1)
    assert torch.equal(ring.inputs.cpu(), plan)
    assert (ring.results[0] == 1).all()
    assert ring.device.next_upload.item() == ring.uploads[1].data_ptr()


def test_connecting_again_begins_with_the_first_buffer() -> None:
    ring = Ring(64, 8)
    ring.connect()
    results = torch.ones(8, dtype=torch.int32, device=DEVICE)
    ring.write(0, 64, 8, seed=0)
    ring.step(results, 1)
    ring.connect()
    plan = ring.write(0, 64, 8, seed=1)
    ring.step(results, 1)
    assert torch.equal(ring.inputs.cpu(), plan)
