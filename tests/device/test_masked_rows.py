"""Rows that may only get the tokens of their slot's mask, beside rows that may get any, on a device."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from support.device_engine import DeviceEngine, add_all, device_engine, random_prompts
from support.random_model import VOCAB_SIZE, write_config

from asyncengine.config import Device
from asyncengine.sampling import SamplingParams, Structured
from gpu_runner.device.token_masks import TokenMasks

pytestmark = pytest.mark.timeout(400)

SHAPE = Structured("regex", "x*")
LENGTHS = [5, 40, 1, 17, 33, 16]
FREE = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
]
BOUND = [
    SamplingParams(temperature=0.0, max_tokens=9, structured=SHAPE),
    SamplingParams(temperature=1.0, seed=5, top_k=50, max_tokens=9, structured=SHAPE, logprobs=3),
    SamplingParams(temperature=2.0, seed=6, frequency_penalty=1.0, max_tokens=9, structured=SHAPE),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngine]:
    device: Device = request.param
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    with device_engine(model, device=device, dtype="float32", load_format="dummy", max_num_seqs=6) as engine:
        yield engine


def every_third(masks: TokenMasks) -> None:
    """Slot s may get the ids that leave s % 3."""
    for slot in range(len(masks.array)):
        bits = np.arange(32 * masks.words) % 3 == slot % 3
        bits[VOCAB_SIZE:] = False
        masks.array[slot] = np.packbits(bits, bitorder="little").view(np.int32)


def test_each_row_keeps_to_its_own_mask_and_its_neighbours_to_none(engine: DeviceEngine) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    alone = engine.core(check=True)
    add_all(alone, prompts[:3], FREE)
    alone.run()
    every_third(engine.executor.masks)
    core = engine.core()
    add_all(core, prompts, [*FREE, *BOUND])
    core.run()
    core.assert_nothing_held()
    assert [core.outputs[rid] for rid in range(3)] == [alone.outputs[rid] for rid in range(3)]
    for (chosen, tops), (same, same_tops) in zip(core.logprobs[1], alone.logprobs[1], strict=True):
        assert [chosen, *tops.values()] == pytest.approx([same, *same_tops.values()], abs=1e-4)
    slot_of = {rid: slot for (slot, _), rid in core.row_of.items()}
    for rid in range(3, 6):
        assert {token % 3 for token in core.outputs[rid]} == {slot_of[rid] % 3}
    # what is reported is the model's own view, which knows of no mask
    assert {token % 3 for _, entries in core.logprobs[4] for token in entries} == {0, 1, 2}
    assert all(chosen <= next(iter(entries.values())) + 1e-5 for chosen, entries in core.logprobs[4])


def test_another_process_writes_the_same_memory(engine: DeviceEngine) -> None:
    masks = engine.executor.masks
    with mmap.mmap(masks.fd, masks.array.nbytes) as other:
        theirs = np.frombuffer(other, np.int32).reshape(masks.array.shape)
        theirs[3] = np.arange(masks.words)
        assert masks.array[3].tolist() == list(range(masks.words))
        assert masks.tensor[3].tolist() == list(range(masks.words))
        del theirs
