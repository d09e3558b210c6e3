"""Launching without waiting, two steps in flight, and errors: with decoders that block or fail."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from device_harness import VOCAB, Prefill, Rig, Row, make_rig, tiny_decoder
from torch import Tensor

from gpu_runner.device.host import usable_cores
from gpu_runner.device.step import Step
from gpu_runner.device.stream import InlineStream, Mark, Work
from gpu_runner.device.target import make_stream
from gpu_runner.kernels.ops import BatchMeta

CPU = torch.device("cpu")


class ScriptedDecoder:
    """Always prefers token 7. Waits for `gate` in each step and raises in the step numbered `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.steps = 0
        self.metas: list[BatchMeta] = []
        self.inputs: list[list[int]] = []
        self._fails_at = fails_at

    def forward(self, token_ids: Tensor, meta: BatchMeta, kv_cache: Tensor) -> Tensor:
        self.entered.set()
        assert self.gate.wait(60)
        self.metas.append(meta)
        self.inputs.append(token_ids.tolist())
        self.steps += 1
        if self.steps == self._fails_at:
            raise ValueError("the device broke")
        return torch.zeros(len(token_ids), 4)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), VOCAB)
        logits[:, 7] = 1.0
        return logits


class LateStream:
    """Its device does nothing until told to."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def submit(self, work: Work) -> None:
        self.work.append(work)

    def mark(self) -> Mark:
        return InlineStream().mark()

    def close(self) -> None:
        pass


def first_plan(rig: Rig) -> Any:
    return rig.plan(prefill=[Prefill(0, 0, [5, 6])], start={0: Row()}, pages=[(0, 0, 3)])


def test_two_steps_are_launched_before_the_first_has_run_and_a_third_is_refused() -> None:
    decoder = ScriptedDecoder()
    rig = make_rig(CPU, decoder=decoder)
    rig.executor.launch(first_plan(rig))
    rig.executor.launch(rig.plan(decode=[(0, 2)]))
    assert decoder.steps == 0
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        rig.executor.launch(rig.plan(decode=[(0, 3)]))

    decoder.gate.set()
    assert [rig.executor.collect().tokens.tolist() for _ in range(2)] == [[7], [7]]
    rig.executor.close()


def test_steps_learn_of_the_hosts_buffers_in_the_order_of_their_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Step, "connect", lambda *_: done.append("connect"))
    monkeypatch.setattr(Step, "run", lambda *_: done.append("run"))
    stream = LateStream()
    rig = make_rig(CPU, stream=stream)
    rig.executor.launch(first_plan(rig))
    assert not done, "what another stream is told, a slow device may do behind the first step"
    for work in stream.work:
        work()
    assert done == ["connect", "run"]


def test_a_decode_step_reads_the_token_that_the_step_before_it_left_on_the_device() -> None:
    decoder = ScriptedDecoder()
    rig = make_rig(CPU, decoder=decoder)
    decoder.gate.set()
    rig.executor.launch(first_plan(rig))
    rig.executor.launch(rig.plan(decode=[(0, 2)]))
    rig.executor.collect()
    rig.executor.collect()
    rig.executor.close()
    assert decoder.inputs == [[5, 6], [7]]
    assert [meta.positions.tolist() for meta in decoder.metas] == [[0, 1], [2]]
    assert [meta.kv_index.tolist() for meta in decoder.metas] == [[48, 49], [50]]


def test_collect_waits_for_the_oldest_step() -> None:
    decoder = ScriptedDecoder()
    rig = make_rig(CPU, decoder=decoder)
    rig.executor.launch(first_plan(rig))
    collected: list[int] = []
    thread = threading.Thread(target=lambda: collected.append(rig.executor.collect().step))
    thread.start()
    assert decoder.entered.wait(60)
    assert not collected
    decoder.gate.set()
    thread.join(60)
    assert collected == [1]
    rig.executor.close()


def test_an_error_in_a_step_is_raised_by_collecting_it_and_all_later_ones() -> None:
    decoder = ScriptedDecoder(fails_at=2)
    rig = make_rig(CPU, decoder=decoder)
    decoder.gate.set()
    rig.executor.launch(first_plan(rig))
    rig.executor.launch(rig.plan(decode=[(0, 2)]))
    assert rig.executor.collect().tokens.tolist() == [7]
    rig.executor.launch(rig.plan(decode=[(0, 3)]))
    for _ in range(2):
        with pytest.raises(ValueError, match="the device broke"):
            rig.executor.collect()
    assert decoder.steps == 2, "nothing runs on the state that a failed step left"
    rig.executor.close()


def test_results_stay_what_they_were_when_their_buffer_is_used_again() -> None:
    rig = make_rig(CPU)
    results = [rig.run(first_plan(rig))]
    results += [rig.run(rig.plan(decode=[(0, 2 + index)])) for index in range(6)]
    tokens = [int(result.tokens[0]) for result in results]
    rig.executor.close()
    again = make_rig(CPU)
    assert tokens == again.generate([5, 6], 7, row=Row(), first_page=3)
    again.executor.close()


def test_a_cpus_step_is_timed_by_the_hosts_clock() -> None:
    rig = make_rig(CPU)
    before = time.monotonic_ns()
    results = [rig.run(first_plan(rig)), rig.run(rig.plan(decode=[(0, 2)]))]
    after = time.monotonic_ns()
    rig.executor.close()
    borders = [time for result in results for time in (result.device_begin_ns, result.device_end_ns)]
    assert [before, *borders, after] == sorted([before, *borders, after])


def test_closing_waits_for_what_was_launched_and_ends_the_thread() -> None:
    decoder = ScriptedDecoder()
    before = threading.active_count()
    rig = make_rig(CPU, decoder=decoder)
    assert threading.active_count() == before + 1
    rig.executor.launch(first_plan(rig))
    decoder.gate.set()
    rig.executor.close()
    assert decoder.steps == 1
    assert threading.active_count() == before


def test_the_cpus_thread_uses_all_usable_cores() -> None:
    stream = make_stream(CPU)
    seen: list[int] = []
    stream.submit(lambda: seen.append(torch.get_num_threads()))
    stream.close()
    assert seen == [usable_cores()]


@pytest.mark.gpu
def test_launching_on_a_gpu_never_waits_for_it() -> None:
    device = torch.device("cuda", 0)
    rig = make_rig(device, decoder=HostBlindDecoder(device))
    rig.run(first_plan(rig))  # what is compiled or allocated at first use may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        rig.executor.launch(
            rig.plan(
                decode=[(0, 2)],
                prefill=[Prefill(1, 0, [3, 4, 5]), Prefill(2, 0, [9])],
                start={
                    1: Row(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, stop_ids=(7,), min_tokens_until=9),
                    2: Row(),
                },
                pages=[(1, 0, 4), (2, 0, 5)],
            )
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rig.executor.collect().tokens.tolist()[0::2] == [7, 7]
    rig.executor.close()


class HostBlindDecoder:
    """Always prefers token 7, and stays on the device."""

    def __init__(self, device: torch.device) -> None:
        self._logits = torch.zeros(VOCAB, device=device)
        self._logits[7] = 9.0

    def forward(self, token_ids: Tensor, meta: BatchMeta, kv_cache: Tensor) -> Tensor:
        return torch.zeros(len(token_ids), 4, device=token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits.repeat(len(hidden), 1)


@pytest.mark.gpu
def test_an_error_in_a_gpus_step_is_raised_by_collecting_it_and_all_later_ones() -> None:
    decoder = ScriptedDecoder(fails_at=1)
    rig = make_rig(torch.device("cuda", 0), decoder=decoder)
    decoder.gate.set()
    rig.executor.launch(first_plan(rig))
    rig.executor.launch(rig.plan(decode=[(0, 2)]))
    for _ in range(2):
        with pytest.raises(ValueError, match="the device broke"):
            rig.executor.collect()
    assert decoder.steps == 1
    rig.executor.close()


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_produce_the_same_greedy_tokens() -> None:
    prompt = [5, 17, 80, 3, 3, 41, 9, 66, 12, 30, 2, 77, 50, 8, 21, 94, 33, 60, 7, 19]
    produced = []
    for device in (CPU, torch.device("cuda", 0)):
        rig = make_rig(device, decoder=tiny_decoder(device))
        produced.append(rig.generate(prompt, 24, row=Row()))
        rig.executor.close()
    assert produced[0] == produced[1]
