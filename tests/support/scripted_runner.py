"""A test double for gpu_runner that speaks the real wire protocol over the real sockets, without a model.

Run in place of gpu_runner with `AsyncEngine.start(..., modules={"gpu_runner": "support.scripted_runner"})` and `tests/`
on PYTHONPATH. It emits one scripted token per row and step: the prompt's own ids unless the script names tokens, and
then the end-of-sequence id, where the row stops. With `ignore_eos` the tokens repeat until `max_tokens`. Rows that ask
for log-probabilities get those of `scripted_logprobs`. What a row emits depends on its position only, so that one that
is resumed goes on as if nothing had happened. The script is the environment variable ASYNCENGINE_SCRIPT, a JSON object
with fields of `Script`.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from dataclasses import dataclass

import msgspec

from asyncengine.config import PAGE_SIZE, SidecarConfig, worker_key
from asyncengine.errors import StartupError
from asyncengine.wire.answers import Failed
from asyncengine.wire.base import Finish
from asyncengine.wire.engine_pipes import EnginePipes
from asyncengine.wire.frames import Open, StepFrame
from asyncengine.wire.pipes import Pipes, Poller, pipe_name
from asyncengine.wire.reports import RunnerInfo
from asyncengine.wire.requests import (
    Abort,
    Generate,
    ReleaseSession,
    Relink,
    Resume,
    StopHit,
    ToRunner,
    ToRunnerControl,
)
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter, run_sidecar

MAX_BACKLOG = 256


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tokens: what every row emits, None for its prompt. instead: of a token of these, what is emitted. step_ms: least
    time between steps. endless_from: a row that ignores the end of the sequence and asks at least so many tokens goes
    on for ever, however slow who watches it is.

    refuse_start: a sentence to die with instead of becoming ready. crash_at_step: die there without a word,
    in each of `crash_lives`.
    refuse_longer_than: prompts with more tokens are answered with `Failed`. sessions: whether it remembers, without an
    end, the latest prompt of each session that is not released.
    """

    tokens: list[int] | None = None
    instead: dict[int, int] = {}
    eos: int = 2
    step_ms: float = 1.0
    endless_from: int | None = None
    vocab_size: int = 49152
    max_model_len: int = 2048
    num_pages: int = 1025
    refuse_start: str | None = None
    refuse_longer_than: int | None = None
    sessions: bool = False
    crash_at_step: int | None = None
    crash_lives: tuple[int, ...] = (0,)


@dataclass
class Row:
    """One running choice; `emitted` of its tokens have left."""

    rid: int
    gen: int
    request: Generate
    tokens: array[int]
    emitted: int = 0

    @property
    def total_tokens(self) -> int:
        return len(self.request.ids) // 4 + self.emitted

    def next_token(self, eos: int, endless_from: int | None) -> tuple[int, Finish]:
        params = self.request.params
        if self.emitted < len(self.tokens) or params.ignore_eos:
            token = self.tokens[self.emitted % len(self.tokens)]
        else:
            token = eos
        self.emitted += 1
        ends = token in params.stop_token_ids or (self.emitted > len(self.tokens) and not params.ignore_eos)
        if ends and self.emitted > params.min_tokens:
            return token, Finish.STOP
        most = self.request.max_tokens
        endless = params.ignore_eos and endless_from is not None and most >= endless_from
        return token, Finish.LENGTH if self.emitted >= most and not endless else Finish.NONE


def scripted_logprobs(position: int, token: int, count: int, vocab_size: int) -> tuple[float, list[int], list[float]]:
    """The log-probability of the output's token number `position`, and the `count` most likely tokens and theirs. At
    odd positions the token itself is none of them. All values are float32 numbers."""
    first = token + position % 2
    ids = [(first + rank) % vocab_size for rank in range(count)]
    return -0.25 * (1 + position % 2 * count), ids, [-0.25 * (1 + rank) for rank in range(count)]


class LogprobColumns:
    """The log-probability columns of one `StepFrame`."""

    def __init__(self) -> None:
        self.rows, self.logprobs = array("i"), array("f")
        self.top_ends, self.top_ids, self.top_logprobs = array("i"), array("i"), array("f")

    def add(self, index: int, logprob: float, ids: list[int], logprobs: list[float]) -> None:
        self.rows.append(index)
        self.logprobs.append(logprob)
        self.top_ids.extend(ids)
        self.top_logprobs.extend(logprobs)
        self.top_ends.append(len(self.top_ids))

    def as_bytes(self) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        columns = (self.rows, self.logprobs, self.top_ends, self.top_ids, self.top_logprobs)
        return tuple(column.tobytes() for column in columns)  # type: ignore[return-value]


class ScriptedRunner:
    def __init__(self, config: SidecarConfig, pipes: Pipes, script: Script) -> None:
        self._pipes = pipes
        self._script = script
        self._life = config.life
        self._requests = pipes.receiver(pipe_name("runner.requests", config.life), ToRunner)
        self._control = pipes.receiver(pipe_name("runner.control", config.life), ToRunnerControl)
        self._poller = Poller(self._requests, self._control)
        self._detokenizer_lives = [
            config.lives.get(worker_key("detokenizer_proc", i), 0) for i in range(config.engine.detokenizer_workers)
        ]
        self._detokenizers = [
            pipes.sender(pipe_name(f"detokenizer.{i}", life)) for i, life in enumerate(self._detokenizer_lives)
        ]
        self._engines = EnginePipes(pipes)
        self._slots: list[Row | None] = [None] * config.engine.max_num_seqs
        self._gens = [0] * len(self._slots)
        self._waiting: deque[tuple[int, Generate, Resume | None, int]] = deque()  # rid, request, from where, since when
        self._aborted: set[int] = set()  # slots whose rows end in the next frame without a token
        self._sessions: dict[tuple[str, str], array[int]] = {}
        self._step = 0
        if self._life:  # before all others: the rows of the one before are over
            for sender in self._detokenizers:
                sender.send(StepFrame(0, b"", b"", b"", b"", life=self._life))

    def run(self, reporter: Reporter) -> None:
        next_step = time.monotonic()
        while True:
            self._drain()
            if reporter.heartbeat_due():
                reporter.heartbeat(self.gauges())
            now = time.monotonic()
            if not self._has_work():
                self._poller.wait(int(HEARTBEAT_SECONDS * 1000))
                next_step = time.monotonic()
            elif now < next_step:
                self._poller.wait(max(1, int((next_step - now) * 1000)))
            elif all(sender.flush() or sender.backlog < MAX_BACKLOG for sender in self._detokenizers):
                self._run_step()
                next_step = max(next_step + self._script.step_ms / 1000, now)
            else:
                self._poller.wait(1)

    def gauges(self) -> dict[str, int]:
        running = [row for row in self._slots if row is not None]
        total = self._script.num_pages - 1
        return {
            "running": len(running),
            "waiting": len(self._waiting),
            "free_pages": total - sum(-(-row.total_tokens // PAGE_SIZE) for row in running),
            "cached_pages": 0,
            "total_pages": total,
        }

    def _has_work(self) -> bool:
        return bool(self._waiting or self._aborted) or any(self._slots)

    def _drain(self) -> None:
        for message in self._requests.drain():
            if isinstance(message, Generate):
                self._add(message)
            elif isinstance(message, Relink):
                self._relink(message)
            else:
                self._abort(message.rid)
        for message in self._control.drain():
            if isinstance(message, StopHit):
                if self._gens[message.slot] == message.gen:
                    self._slots[message.slot] = None
                    self._aborted.discard(message.slot)
            elif isinstance(message, ReleaseSession):
                self._sessions.pop((message.tenant, message.session), None)
            elif isinstance(message, Abort):
                self._abort(message.rid)

    def _add(self, request: Generate) -> None:
        if self._engines.lost(request.rid):
            return
        limit, size = self._script.refuse_longer_than, len(request.ids) // 4
        if limit is not None and size > limit:
            failed = Failed(
                request.rid, 400, f"{size} tokens do not fit into {limit}", "context_length_exceeded", "prompt"
            )
            self._engines.send(request.rid, failed)
            return
        now = time.monotonic_ns()
        resumes: tuple[Resume | None, ...] = request.resume or (None,) * request.params.n
        self._waiting.extend((request.rid + place, request, resume, now) for place, resume in enumerate(resumes))

    def _relink(self, relink: Relink) -> None:
        index, life = relink.index, relink.life
        if relink.role == "detokenizer_proc" and life > self._detokenizer_lives[index]:
            self._detokenizer_lives[index] = life
            self._pipes.drop(self._detokenizers[index])
            self._detokenizers[index] = self._pipes.sender(pipe_name(f"detokenizer.{index}", life))
        elif relink.role == "api_worker" and self._engines.relink(index, life):
            for sender in self._detokenizers:
                sender.send(relink)
            for rid in [rid for rid, *_ in self._waiting] + [row.rid for row in self._slots if row is not None]:
                if self._engines.lost(rid):
                    self._abort(rid)

    def _abort(self, rid: int) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] != rid)
        for slot, row in enumerate(self._slots):
            if row is not None and row.rid == rid:
                self._aborted.add(slot)

    def _run_step(self) -> None:
        if self._step == self._script.crash_at_step and self._life in self._script.crash_lives:
            os._exit(17)
        opens = self._admit()
        slots, gens, tokens, finish = array("i"), array("i"), array("i"), bytearray()
        rows: list[Row] = []
        for slot, row in enumerate(self._slots):
            if row is None:
                continue
            if slot in self._aborted:
                token, end = -1, Finish.ABORT
            else:
                token, end = row.next_token(self._script.eos, self._script.endless_from)
            rows.append(row)
            slots.append(slot)
            gens.append(row.gen)
            tokens.append(token)
            finish.append(end)
            if end:
                self._slots[slot] = None
        self._aborted.clear()
        shards = len(self._detokenizers)
        for index, sender in enumerate(self._detokenizers):
            mine = [i for i, slot in enumerate(slots) if slot % shards == index]
            if mine:
                frame = StepFrame(
                    self._step,
                    array("i", (slots[i] for i in mine)).tobytes(),
                    array("i", (gens[i] for i in mine)).tobytes(),
                    array("i", (tokens[i] for i in mine)).tobytes(),
                    bytes(finish[i] for i in mine),
                    tuple(row for row in opens if row.slot % shards == index),
                    *self._logprobs([(rows[i], tokens[i]) for i in mine]).as_bytes(),
                    life=self._life,
                )
                sender.send(frame)
        self._step += 1

    def _logprobs(self, frame: list[tuple[Row, int]]) -> LogprobColumns:
        columns = LogprobColumns()
        for index, (row, token) in enumerate(frame):
            count = row.request.params.logprobs
            if count is not None and token >= 0:
                columns.add(index, *scripted_logprobs(row.emitted - 1, token, count, self._script.vocab_size))
        return columns

    def _admit(self) -> list[Open]:
        opens = []
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._waiting:
                rid, request, resume, queued = self._waiting.popleft()
                now = time.monotonic_ns()
                self._gens[slot] += 1
                prompt = array("i", request.ids)
                tokens = prompt if self._script.tokens is None else array("i", self._script.tokens)
                tokens = array("i", (self._script.instead.get(token, token) for token in tokens))
                resumed, shown = (resume.ids, resume.shown) if resume else (b"", 0)
                gen = self._gens[slot]
                self._slots[slot] = Row(rid, gen, request, tokens, emitted=len(resumed) // 4)
                stamps = (queued, now, now + 1)
                opened = Open(slot, gen, rid, request.detok, len(prompt), 0, *stamps, resumed=resumed, shown=shown)
                session_tokens, session_common = self._session(request, prompt)
                opens.append(
                    msgspec.structs.replace(opened, session_tokens=session_tokens, session_common=session_common)
                )
        return opens

    def _session(self, request: Generate, prompt: array[int]) -> tuple[int, int]:
        """What `Open` says of the request's session, which from now on has this prompt."""
        key = (request.terms.tenant, request.terms.session)
        if not self._script.sessions or not key[1]:
            return -1, 0
        before = self._sessions.get(key)
        self._sessions[key] = prompt
        if before is None:
            return -1, 0
        equal = [old == new for old, new in zip(before, prompt, strict=False)]
        return len(before), equal.index(False) if False in equal else len(equal)


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    script = msgspec.json.decode(os.environ.get("ASYNCENGINE_SCRIPT", "{}"), type=Script)
    reporter.progress("loading weights", 50, 100)
    if script.refuse_start is not None:
        raise StartupError(script.refuse_start)
    runner = ScriptedRunner(config, pipes, script)
    reporter.progress("loading weights", 100, 100)
    reporter.ready(
        RunnerInfo(
            device="cpu",
            dtype="float32",
            architecture="scripted",
            vocab_size=script.vocab_size,
            max_model_len=config.engine.max_model_len or script.max_model_len,
            num_pages=script.num_pages,
            weight_bytes=100,
            kv_cache_bytes=script.num_pages * PAGE_SIZE,
        )
    )
    runner.run(reporter)


if __name__ == "__main__":
    run_sidecar("gpu_runner", serve)
