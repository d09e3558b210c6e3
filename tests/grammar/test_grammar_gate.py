"""What gpu_runner does while grammar processes answer, are slow, or die: with stand-ins for the processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncengine.config import GrammarConfig
from asyncengine.errors import EngineError, InvalidRequestError
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.terms import Terms
from asyncengine.wire.grammar_messages import (
    AdvanceMatches,
    CheckGrammar,
    GrammarChecked,
    GrammarReady,
    MasksReady,
    MatchFailed,
    OpenMatch,
)
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Generate
from gpu_runner.grammar.checker import CHECK_SECONDS, PATIENCE, GrammarChecker
from gpu_runner.grammar.gate import GrammarGate
from gpu_runner.grammar.matches import ANSWER_SECONDS, Matches
from gpu_runner.grammar.process import START_SECONDS
from gpu_runner.schedule.mask_work import MaskWork, OpenedRow
from gpu_runner.schedule.masked_rows import MaskedRows
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import Slots


class FakeProcess:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.ready = False
        self.alive = True
        self.cpu_seconds = 0.0
        self.killed = False
        self.sent: list[Any] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def flush(self) -> None: ...

    def hear(self, message: Any) -> bool:
        self.ready |= isinstance(message, GrammarReady) and message.incarnation == self.incarnation
        return bool(message.incarnation == self.incarnation)

    def kill(self) -> None:
        self.killed = True


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Started:
    """Makes processes and keeps them."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []

    def __call__(self) -> Any:
        self.processes.append(FakeProcess(len(self.processes)))
        return self.processes[-1]


def regex(text: str) -> Structured:
    return Structured("regex", text)


def request(rid: int, structured: Structured) -> Generate:
    return Generate(rid, bytes(4), SamplingParams(structured=structured), 1, b"", "")


class Checks:
    def __init__(self) -> None:
        self.clock, self.started = Clock(), Started()
        self.checker = GrammarChecker(self.started, clock=self.clock)

    @property
    def process(self) -> FakeProcess:
        return self.started.processes[-1]

    def begin(self) -> None:
        self.checker.hear(GrammarReady(self.process.incarnation))

    def answer(self, error: str = "") -> None:
        question = self.process.sent[-1]
        assert isinstance(question, CheckGrammar)
        self.checker.hear(GrammarChecked(self.process.incarnation, question.number, error))

    def settled(self) -> dict[int, EngineError | None]:
        return {message.rid: error for message, error in self.checker.take_settled()}


def test_choices_that_wait_for_a_verdict_are_counted_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarGate, "_start", lambda *_: FakeProcess(1))
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    config = GrammarConfig(model_path="", run_dir=str(run_dir), eos_ids=(0,), mask_fd=0, num_slots=4, mask_words=1)
    gate = GrammarGate(pipes=pipes, rows=MaskedRows(slots := Slots(4, 16), Running(slots)), config=config)
    gate.submit(Generate(1, bytes(4), SamplingParams(n=2, structured=regex("a")), 1, b"", ""))
    background = Terms(service_class="background")
    gate.submit(Generate(3, bytes(4), SamplingParams(structured=regex("b")), 1, b"", "", (), background))
    assert (gate.num_parked("interactive"), gate.num_parked("background")) == (2, 1)
    assert gate.parked_rids() == {1, 2, 3}
    gate.abort(3)
    gate.abort(2)
    assert (gate.num_parked("interactive"), gate.num_parked("background")) == (1, 0)
    pipes.close()
    shutil.rmtree(run_dir)


@pytest.fixture
def checks() -> Checks:
    return Checks()


def test_nothing_is_started_before_it_is_wanted(checks: Checks) -> None:
    checks.checker.poll()
    assert checks.started.processes == []
    assert not checks.checker.busy


def test_one_structure_at_a_time_is_checked_and_only_once(checks: Checks) -> None:
    for rid, text in enumerate(["a", "b", "a"]):
        checks.checker.submit(request(rid, regex(text)))
    assert checks.process.sent == []
    checks.begin()
    assert [message.structured.text for message in checks.process.sent] == ["a"]
    checks.answer()
    assert checks.settled() == {0: None, 2: None}
    assert [message.structured.text for message in checks.process.sent] == ["a", "b"]
    checks.answer("b is bad")
    (error,) = checks.settled().values()
    assert isinstance(error, InvalidRequestError)
    assert (error.message, error.param) == ("b is bad", "structured_outputs")
    checks.checker.submit(request(3, regex("b")))
    checks.checker.submit(request(4, regex("a")))
    settled = checks.settled()
    assert settled[4] is None
    assert settled[3] is not None
    assert len(checks.process.sent) == 2
    assert not checks.checker.busy


@pytest.mark.parametrize("crash", [False, True])
def test_a_check_that_takes_too_long_or_kills_its_process_costs_only_itself(checks: Checks, crash: bool) -> None:
    checks.checker.submit(request(0, regex("slow")))
    checks.checker.submit(request(1, regex("quick")))
    checks.begin()
    checks.clock.now += CHECK_SECONDS * 0.9
    checks.checker.poll()
    assert checks.settled() == {}
    if crash:
        checks.process.alive = False
    else:
        checks.clock.now += CHECK_SECONDS * 0.2
        checks.process.cpu_seconds = CHECK_SECONDS * 1.1
    checks.checker.poll()
    (error,) = checks.settled().values()
    assert isinstance(error, InvalidRequestError)
    assert ("more than can be compiled" if crash else "takes more than 2 s") in error.message
    assert checks.process.killed
    checks.checker.poll()
    assert len(checks.started.processes) == 2
    checks.begin()
    checks.answer()
    assert checks.settled() == {1: None}
    checks.checker.submit(request(2, regex("slow")))
    assert checks.settled()[2] is not None, "it is not tried again"


def test_a_check_that_gets_little_of_the_cpu_may_last_longer_but_not_for_ever(checks: Checks) -> None:
    checks.checker.submit(request(0, regex("starved")))
    checks.begin()
    for _ in range(PATIENCE - 1):
        checks.clock.now += CHECK_SECONDS
        checks.process.cpu_seconds += CHECK_SECONDS / PATIENCE
        checks.checker.poll()
        assert checks.settled() == {}
    checks.clock.now += 2 * CHECK_SECONDS
    checks.checker.poll()
    (error,) = checks.settled().values()
    assert isinstance(error, InvalidRequestError)


def test_a_process_that_idled_long_is_not_late(checks: Checks) -> None:
    checks.checker.submit(request(0, regex("a")))
    checks.begin()
    checks.answer()
    checks.clock.now += 10 * START_SECONDS
    checks.checker.submit(request(1, regex("b")))
    checks.checker.poll()
    assert not checks.process.killed
    checks.answer()
    assert checks.settled() == {0: None, 1: None}


def test_if_no_process_comes_up_all_that_wait_are_told(checks: Checks) -> None:
    for rid in range(2):
        checks.checker.submit(request(rid, regex(str(rid))))
    checks.clock.now += START_SECONDS + 1
    checks.checker.poll()
    errors = checks.settled()
    assert len(errors) == 2
    assert all(error is not None and error.status == 500 for error in errors.values())
    checks.checker.submit(request(5, regex("0")))
    assert len(checks.started.processes) == 2, "the next one tries again"


def test_what_a_killed_process_said_is_not_heard(checks: Checks) -> None:
    checks.checker.submit(request(0, regex("slow")))
    checks.begin()
    old = checks.process.sent[-1]
    checks.clock.now += CHECK_SECONDS + 1
    checks.process.cpu_seconds = CHECK_SECONDS
    checks.checker.poll()
    checks.settled()
    checks.checker.submit(request(1, regex("b")))
    checks.begin()
    checks.checker.hear(GrammarChecked(0, old.number, ""))
    checks.checker.hear(GrammarChecked(1, old.number, ""))
    assert checks.settled() == {}


# -------------------------------------------------------------------------------------------------------------- masks


class Rows:
    """The scheduler's part: what was said to be ready, and every row's text."""

    def __init__(self) -> None:
        self.said_ready: list[tuple[int, int]] = []
        self.texts: dict[tuple[int, int], list[int]] = {}

    def ready(self, rows: np.ndarray, gens: np.ndarray) -> None:
        self.said_ready += zip(rows.tolist(), gens.tolist(), strict=True)

    def output_of(self, slot: int, gen: int) -> tuple[Structured, np.ndarray] | None:
        text = self.texts.get((slot, gen))
        return None if text is None else (regex("x"), ints(*text))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Masking:
    def __init__(self) -> None:
        self.clock, self.started, self.rows = Clock(), Started(), Rows()
        self.matches = Matches(self.rows, self.started, num_slots=8, clock=self.clock)

    @property
    def process(self) -> FakeProcess:
        return self.started.processes[-1]

    def open(self, slot: int, gen: int) -> None:
        self.rows.texts[slot, gen] = []
        self.matches.ask(MaskWork(opened=(OpenedRow(slot, gen, regex("x"), ints()),)))

    def advance(self, *rows: tuple[int, int, int]) -> None:
        for slot, gen, token in rows:
            self.rows.texts[slot, gen].append(token)
        self.matches.ask(MaskWork((), *(ints(*column) for column in zip(*rows, strict=True))))

    def answer(self, *rows: tuple[int, int]) -> None:
        slots, gens = (ints(*column).tobytes() for column in zip(*rows, strict=True))
        self.matches.hear(MasksReady(self.process.incarnation, slots, gens))


@pytest.fixture
def masking() -> Masking:
    masking = Masking()
    masking.matches.prepare()
    masking.matches.hear(GrammarReady(0))
    return masking


def kinds(messages: list[Any]) -> list[Callable[..., Any]]:
    return [type(message) for message in messages]


def test_masks_are_asked_for_and_arrive(masking: Masking) -> None:
    masking.open(3, 1)
    assert masking.matches.busy
    masking.answer((3, 1))
    masking.advance((3, 1, 40))
    masking.answer((3, 1))
    assert masking.rows.said_ready == [(3, 1), (3, 1)]
    assert kinds(masking.process.sent) == [OpenMatch, AdvanceMatches]
    assert not masking.matches.busy


def test_the_mask_of_a_row_that_has_ended_is_not_taken_for_its_successors(masking: Masking) -> None:
    masking.open(3, 1)
    masking.open(3, 2)
    masking.answer((3, 1))
    assert masking.rows.said_ready == []
    masking.answer((3, 2))
    assert masking.rows.said_ready == [(3, 2)]


def test_a_row_that_fails_is_named_with_the_reason(masking: Masking) -> None:
    masking.open(2, 0)
    masking.matches.hear(MatchFailed(0, 2, 0, "too complex"))
    assert masking.matches.take_failed() == [(2, 0, "too complex")]
    assert not masking.matches.busy


@pytest.mark.parametrize("crash", [False, True])
def test_a_lost_process_takes_along_only_rows_that_it_owed_a_mask(masking: Masking, crash: bool) -> None:
    masking.open(1, 0)
    masking.open(2, 0)
    masking.answer((1, 0), (2, 0))
    masking.advance((1, 0, 50))
    if crash:
        masking.process.alive = False
        masking.clock.now += 1
    else:
        masking.clock.now += ANSWER_SECONDS + 1
    masking.matches.poll()
    ((slot, gen, _),) = masking.matches.take_failed()
    assert (slot, gen) == (1, 0)
    assert masking.started.processes[0].killed
    # the other had its mask: it is opened anew, with all of its text, when it wants the next one
    masking.advance((2, 0, 60))
    (opened,) = masking.process.sent
    assert masking.process.incarnation == 1
    assert isinstance(opened, OpenMatch)
    assert np.frombuffer(opened.tokens, np.int32).tolist() == [60]
    masking.answer((2, 0))
    masking.advance((2, 0, 61))
    assert kinds(masking.process.sent) == [OpenMatch, AdvanceMatches]


def test_a_process_that_owes_nothing_may_be_silent(masking: Masking) -> None:
    masking.open(1, 0)
    masking.answer((1, 0))
    masking.clock.now += 100 * ANSWER_SECONDS
    masking.matches.poll()
    masking.advance((1, 0, 9))
    masking.matches.poll()
    assert masking.matches.take_failed() == []
    assert len(masking.started.processes) == 1
