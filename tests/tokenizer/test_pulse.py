"""A tokenizer that is busy for long is known to live, and one that hangs is not for ever."""

from __future__ import annotations

import threading
import time

import pytest
from support.eventually import eventually

from tokenizer_proc import pulse as pulse_module
from tokenizer_proc.pulse import Pulse


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "HEARTBEAT_SECONDS", 0.01)


async def test_it_beats_in_a_turn_and_not_outside_of_one() -> None:
    threads: list[threading.Thread] = []
    pulse = Pulse(lambda: threads.append(threading.current_thread()))
    for _ in range(2):
        threads.clear()
        with pulse.turn():
            await eventually(lambda: len(threads) > 2)
        after = len(threads)
        time.sleep(0.1)
        assert len(threads) == after
    assert threading.main_thread() not in threads


async def test_a_turn_that_does_not_end_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "TURN_SECONDS", 0.5)
    beats: list[float] = []
    pulse = Pulse(lambda: beats.append(time.monotonic()))
    with pulse.turn():
        began = time.monotonic()
        await eventually(lambda: time.monotonic() > began + 1)
        before = len(beats)
        time.sleep(0.1)
        assert len(beats) == before
