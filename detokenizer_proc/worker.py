"""The detokenizer's loop: step frames in, one `Deltas` message per API worker and turn out, stop hits back.

There is one Python loop over rows, in `Worker._push`; a row's step is a table look-up and, with stop strings, one
automaton step per character.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from asyncengine.config import SidecarConfig, worker_key
from asyncengine.tokenizer_file import load_tokenizer
from asyncengine.wire.accounting import RingWriter, TurnRecord
from asyncengine.wire.base import Finish
from asyncengine.wire.checks import check
from asyncengine.wire.engine_pipes import ApiProcess, minter
from asyncengine.wire.frames import DetokenizeOptions, Open, StepFrame, ToDetokenizer
from asyncengine.wire.pipes import Pipes, pipe_name
from asyncengine.wire.requests import Relink, StopHit
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter
from detokenizer_proc.deltas import DeltaOutbox
from detokenizer_proc.logprob_columns import Entry, prompt_columns, step_logprobs
from detokenizer_proc.logprob_gate import LogprobGate
from detokenizer_proc.row import Row
from detokenizer_proc.stop_strings import StopAutomaton, StopSearch
from detokenizer_proc.vocabulary import Vocabulary

ENGINE_HIGH_WATER_MARK = 2
"""`Deltas` in flight to an API worker before its requests' deltas merge here."""
FRAMES_PER_TURN = 64
"""Bounds how long a burst of frames can delay what the first of them produced."""
RETRY_MS = 2
IDLE_MS = int(HEARTBEAT_SECONDS * 1000)
CACHED_AUTOMATA = 256
NO_TOKEN = -1


class Worker:
    """Detokenizer worker `index`: owns its pipes' ends and every open row.

    gpu_runner   step N: slot 3 gen 7        step N+1: slot 3 gen 7     step N+2: slot 3 gen 8
    here         stop found, StopHit(3, 7),  ignored: no such row       Open(3, 8) came with it
                 row forgotten

    gpu_runner is lost and replaced; the pipe into here stays, and may still hold frames of the lost one:

    life 0       step N, killed      step N+1, late
    life 1                empty frame          step 0: Open(3, 1), resumed
    here         rows     forgotten   dropped  a row again, which goes on where its caller's text ends
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        pipes: Pipes,
        *,
        index: int,
        ring: RingWriter[TurnRecord],
        life: int = 0,
        runner_life: int = 0,
    ) -> None:
        """ring: where each turn is recorded. life, runner_life: this worker's, and that of gpu_runner as far as is
        known; its frames tell when it is another one."""
        self._vocabulary = vocabulary
        self._pipes = pipes
        self._index = index
        self._ring = ring
        self._frames = pipes.receiver(pipe_name(f"detokenizer.{index}", life), ToDetokenizer)
        self._runner_life = runner_life
        self._control = pipes.sender(pipe_name("runner.control", runner_life))
        self._outboxes: dict[ApiProcess, DeltaOutbox] = {}
        self._rows: dict[int, Row] = {}
        self._options = msgspec.msgpack.Decoder(DetokenizeOptions)
        self._automaton = lru_cache(maxsize=CACHED_AUTOMATA)(StopAutomaton)
        self._stop_hits = 0
        self._bad_ids = 0
        self._bad_opens = 0

    def turn(self, wait_ms: int) -> None:
        """Wait for a frame, take all that have arrived, send what they produced. Comes back early, to try again, while
        an API worker is behind."""
        self._frames.wait(min(wait_ms, RETRY_MS) if self._behind() else wait_ms)
        begin, frames, tokens = time.monotonic_ns(), 0, 0
        for frame in self._frames.drain(FRAMES_PER_TURN):
            if isinstance(frame, Relink):
                self._relink_engine(frame.index, frame.life)
                continue
            self.take(frame)
            frames += 1
            tokens += len(frame.finish)
        middle = time.monotonic_ns()
        for outbox in self._outboxes.values():
            outbox.send()
        self._control.flush()
        if frames:
            waiting = sum(outbox.waiting for outbox in self._outboxes.values())
            self._ring.write((begin, middle, time.monotonic_ns(), frames, tokens, len(self._rows), waiting))

    def gauges(self) -> dict[str, int]:
        """streams: open rows. pending: requests whose deltas wait for a full pipe. The others count since the start."""
        return {
            "streams": len(self._rows),
            "pending": sum(outbox.waiting for outbox in self._outboxes.values()),
            "stop_hits": self._stop_hits,
            "bad_ids": self._bad_ids,
            "malformed": self._frames.malformed + self._bad_opens,
        }

    def take(self, frame: StepFrame) -> None:
        """Apply one step. Frames of a gpu_runner that has been replaced are late and ignored."""
        if frame.life < self._runner_life:
            return
        if frame.life > self._runner_life:
            self._follow(frame.life)
        for opened in frame.opens:
            self._open(opened)
        for marked in frame.marks:
            if marked.slot in self._rows:
                self._rows[marked.slot].delta.marks += marked.marks
        if frame.logprob_rows:
            self._stage_logprobs(frame)
        self._push(_int32(frame.slots), _int32(frame.gens), _int32(frame.tokens), frame.finish)

    def check_integrity(self) -> None:
        """Raises AssertionError when the rows and the outboxes contradict each other."""
        for slot, row in self._rows.items():
            assert row.slot == slot
            assert row.delta.finish == Finish.NONE
            assert row.outbox is self._outboxes[minter(row.delta.rid)]
            assert row.delta.queued or not (row.delta.ids or row.delta.text or row.delta.logprobs)
        for outbox in self._outboxes.values():
            outbox.check_integrity()

    def _behind(self) -> bool:
        return self._control.backlog > 0 or any(outbox.waiting for outbox in self._outboxes.values())

    def _follow(self, runner_life: int) -> None:
        """Another gpu_runner has begun: the rows were the lost one's. What they have queued still goes out."""
        self._rows.clear()
        self._pipes.drop(self._control)
        self._control = self._pipes.sender(pipe_name("runner.control", runner_life))
        self._runner_life = runner_life

    def _relink_engine(self, worker: int, life: int) -> None:
        """An API worker was lost, and number `life` is in its place: the rows of those before it are nobody's, nor is
        what they have queued."""
        for process in [each for each in self._outboxes if each.worker == worker and each.life < life]:
            outbox = self._outboxes.pop(process)
            self._pipes.drop(outbox.sender)
            self._rows = {slot: row for slot, row in self._rows.items() if row.outbox is not outbox}

    def _push(self, slots: Iterable[int], gens: Iterable[int], tokens: Iterable[int], finishes: bytes) -> None:
        """Take one token of each row, in order. Rows of a generation that is not open are late and ignored."""
        rows, size = self._rows, self._vocabulary.size
        for slot, gen, token, finish in zip(slots, gens, tokens, finishes, strict=True):
            row = rows.get(slot)
            if row is None or row.gen != gen:
                continue
            delta = row.delta
            if not delta.queued:
                row.outbox.add(delta)
            if finish:
                self._end(row, token, finish)
                continue
            if not 0 <= token < size:
                self._end_with_bad_id(row, token)
                self._stop_runner(row)
                continue
            delta.ids.append(token)
            text = row.stream.push(token)
            gate = row.gate
            if gate is not None:
                text = gate.push(text)
                if gate.hit >= 0:
                    self._close(row, text, Finish.STOP_STRING, gate.hit)
                    self._stop_runner(row)
                    continue
            if text:
                delta.text.append(text)

    def _open(self, opened: Open) -> None:
        try:
            options = self._options.decode(opened.detok)
            check(options)
        except (msgspec.DecodeError, ValueError):
            self._bad_opens += 1  # its tokens are those of no open row
            return
        stream = self._vocabulary.open(
            skip_special_tokens=options.skip_special_tokens,
            prompt_tail=_int32(options.prompt_tail),
            prompt_tokens=opened.prompt_tokens,
            shown_tokens=options.shown_tokens,
        )
        include_stop = options.include_stop_str_in_output
        search = StopSearch(self._automaton(options.stop), include_stop=include_stop) if options.stop else None
        outbox = self._outbox(minter(opened.rid))
        row = self._rows[opened.slot] = Row(opened, options, stream=stream, search=search, outbox=outbox)
        if options.prefix:
            row.delta.text.append(options.prefix)
        if opened.prompt is not None:
            row.delta.prompt = prompt_columns(opened.prompt, self._vocabulary.token_bytes)
        if opened.resumed:
            self._resume(row, _int32(opened.resumed))

    def _resume(self, row: Row, ids: list[int]) -> None:
        """Bring the row to where it was behind its first `ids`, which are not sent again; nor are their
        log-probabilities, which no frame has. Text beyond what its caller has is sent, and the row may end here: with
        a stop string whose news was lost."""
        self._push([row.slot] * len(ids), [row.gen] * len(ids), ids, bytes(len(ids)))
        row.delta.ids.clear()

    def _outbox(self, process: ApiProcess) -> DeltaOutbox:
        if process not in self._outboxes:
            sender = self._pipes.sender(process.pipe, high_water_mark=ENGINE_HIGH_WATER_MARK)
            self._outboxes[process] = DeltaOutbox(sender, shard=self._index)
        return self._outboxes[process]

    def _stage_logprobs(self, frame: StepFrame) -> None:
        """Have the log-probabilities of the frame's tokens wait at their rows for the tokens' text."""
        slots, gens, tokens = _int32(frame.slots), _int32(frame.gens), _int32(frame.tokens)
        token_bytes = self._vocabulary.token_bytes
        for index, top_ids, logprobs in step_logprobs(frame):
            row = self._rows.get(slots[index])
            if row is not None and row.gen == gens[index] and isinstance(row.gate, LogprobGate):
                ids = [tokens[index], *top_ids]
                row.gate.stage(Entry(ids, logprobs, [token_bytes(token) for token in ids]))

    def _end(self, row: Row, token: int, finish: int) -> None:
        """The row ended in gpu_runner, perhaps with a last token. A stop token's text is shown only on request."""
        if row.no_output and token != NO_TOKEN:
            row.unstage()
            self._finish(row, "", Finish.LENGTH, -1)
            return
        is_stop = finish == Finish.STOP
        if token != NO_TOKEN and not is_stop and not 0 <= token < self._vocabulary.size:
            self._end_with_bad_id(row, token)
            return
        text = ""
        if token != NO_TOKEN:
            row.delta.ids.append(token)
            if (not is_stop or row.include_stop) and token < self._vocabulary.size:
                text = row.stream.push(token)
        if is_stop and not text:
            row.unstage()
        self._finish(row, text, finish, token if is_stop else -1)

    def _end_with_bad_id(self, row: Row, token: int) -> None:
        self._bad_ids += 1
        row.unstage()
        self._finish(row, "", Finish.ERROR, token)

    def _finish(self, row: Row, text: str, finish: int, stop_reason: int) -> None:
        """Show what was held back and close; a stop string that only the last characters complete still counts."""
        text += row.stream.flush()
        gate = row.gate
        if gate is not None:
            text = gate.push(text)
            if gate.hit >= 0:
                finish, stop_reason = Finish.STOP_STRING, gate.hit
            text += gate.flush()
        self._close(row, text, finish, stop_reason)

    def _close(self, row: Row, text: str, finish: int, stop_reason: int) -> None:
        delta = row.delta
        if text:
            delta.text.append(text)
        delta.finish = finish
        delta.stop_reason = stop_reason
        del self._rows[row.slot]
        self._stop_hits += finish == Finish.STOP_STRING

    def _stop_runner(self, row: Row) -> None:
        self._control.send(StopHit(row.slot, row.gen))


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    """Load the tokenizer, test it, then detokenize until the process is told to end."""
    reporter.progress("tokenizer")
    vocabulary = Vocabulary(load_tokenizer(config.model_path).tokenizer)
    ring = RingWriter(config.run_dir, config.role, config.index, TurnRecord)
    runner_life = config.lives.get(worker_key("gpu_runner", 0), 0)
    worker = Worker(vocabulary, pipes, index=config.index, ring=ring, life=config.life, runner_life=runner_life)
    gc.collect()
    gc.freeze()  # the byte table lives as long as the process; no collection need look at it
    reporter.ready()
    while True:
        worker.turn(IDLE_MS)
        if reporter.heartbeat_due():
            reporter.heartbeat(worker.gauges())


def _int32(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()
