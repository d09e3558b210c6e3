"""What one step costs the host, without a model or a GPU: microseconds by part of the loop and batch size.

    python scripts/bench_host.py [--steps 2000] [--batches 1,64,512] [--wait-ms 3] [--evict-mb 4] [--json out.json]

First table: every row decodes, the steady state, where the cost should hardly depend on the batch. In one of 16 steps
each row takes a page from the pool: medians are those of the others, the 99th percentile shows it. Results are made up,
two steps in flight as in the real loop.

Second table, with the largest batch: a closed loop of so many requests, each followed by another one when it ends, over
the steps in which rows join or leave; median and 99th percentile of each part. Third: as many requests come at once;
until all have started, what each part takes in all, divided by their number, and the longest that it took in one turn.
Requests come by their pipe, and their answers leave, as in the real loop; what a client does is not counted.

    uncached    prefix caching is off
    distinct    prompts have nothing in common; in the second table the cache is full, so that each finds its pages by
                eviction
    shared      prompts begin like one of a few, with three pages of seven
    grouped     as distinct, but requests come sixteen at a time, as where prompts wait for one another

A device that takes a while leaves the host's caches to others: `--wait-ms` spins for each result, `--evict-mb` walks
over as much memory meanwhile. Both are outside the parts.

    drain     look into both of gpu_runner's pipes, and find nothing
    plan      `Scheduler.plan`
    pack      `Executor.launch` and `Executor.collect` round a device that does nothing: the path is chosen, the plan
              packed, the results copied out. What a real device adds (copies, replays, an event) is missing
    commit    `Scheduler.commit`
    send      the step's frame, encoded and sent to a local PULL socket
    account   the turn's record; the clock readings between the parts, which the loop makes too, are in the parts
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.config import PAGE_SIZE
from asyncengine.sampling import SamplingParams
from asyncengine.wire.accounting import RingWriter, StepRecord
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import ToDetokenizer
from asyncengine.wire.pipes import Pipes, Sender, make_run_dir
from asyncengine.wire.reports import RunnerInfo
from asyncengine.wire.requests import Generate
from gpu_runner.accounting import COMMIT, DRAIN, LAUNCH, PLAN, SEND, WAIT, StepAccount
from gpu_runner.device.buffers import PackedStep, RingSlot, pages_for
from gpu_runner.device.executor import MAX_IN_FLIGHT, Executor
from gpu_runner.device.stream import Work
from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.inbox import Inbox
from gpu_runner.models.config import ModelConfig, RopeConfig
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import QueueLimits
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.scheduler import Scheduler, num_slots_for
from gpu_runner.schedule.step_output import StepOutput

BATCHES = (1, 64, 256, 512, 1024)
PARTS = ("drain", "plan", "pack", "commit", "send", "account")
PROMPT_TOKENS = 64
MAX_NUM_BATCHED_TOKENS = 8192
VOCAB = 50_000
MEAN_PROMPT_TOKENS, ANSWER_TOKENS = 110, 276
"""The means of ShareGPT's conversations."""
SHARED_TOKENS, SHARED_PREFIXES = 3 * PAGE_SIZE, 8
GROUP = 16
LONGEST = MEAN_PROMPT_TOKENS + PAGE_SIZE + ANSWER_TOKENS
BURSTS = 5
BURST_ARRIVES_SECONDS = 0.1
TURNOVERS = ("uncached", "distinct", "shared", "grouped")


class NoDevice:
    """Step, stream and mark of a device that computes nothing. Its results are all token 0; a row ends by its limit.

    wait_ms, evict_mb: how long results take, and how much memory is touched meanwhile.
    """

    def __init__(self, wait_ms: float = 0.0, evict_mb: int = 0) -> None:
        self._wait_s = wait_ms / 1e3
        self._evicting = np.zeros(evict_mb << 17)
        self._running: deque[PackedStep] = deque()
        self.waited_s = 0.0  # for the last result

    def connect(self, ring: Sequence[RingSlot], masks: TokenMasks) -> None:
        for slot in ring:
            slot.results.zero_()
        self._ring = ring
        self._limit = np.zeros(len(ring[0].tokens), np.int32)  # by slot

    def run(self, step: PackedStep) -> None:
        self._running.append(step)

    def submit(self, work: Work) -> None:
        work()

    def prepare(self, work: Work) -> Work:
        return work

    def mark(self) -> NoDevice:
        return self

    def record(self) -> None:
        pass

    def wait(self) -> None:
        begin = time.perf_counter()
        self._evicting += 1.0
        step = self._running.popleft()
        plan = step.plan
        self._limit[plan.start.slot] = plan.start.limit
        ends = plan.row_samples & (plan.row_start + plan.row_len + 1 >= self._limit[plan.row_slot])
        self._ring[step.turn].finish[: len(ends)] = np.where(ends, int(Finish.LENGTH), int(Finish.NONE))
        while time.perf_counter() < begin + self._wait_s:
            pass
        self.waited_s = time.perf_counter() - begin

    def done(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Turn(NamedTuple):
    """One round of the loop: the step that was launched, what of another one was collected, and seconds by part."""

    plan: StepPlan | None
    output: StepOutput | None
    seconds: list[float]  # [len(PARTS)]


class Host:
    """All that the loop calls, for `batch` rows of up to `length` tokens."""

    def __init__(
        self, batch: int, length: int, device: NoDevice, run_dir: Path, pipes: Pipes, *, caching: bool = True
    ) -> None:
        num_pages = 1 + batch * pages_for(length)
        self.device = device
        self.scheduler = Scheduler(
            num_pages=num_pages,
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=caching,
        )
        self.executor = Executor(
            step=device,
            model_config=_no_model(length),
            stream=device,
            info=RunnerInfo(
                device="none",
                dtype="float32",
                architecture="none",
                vocab_size=VOCAB,
                max_model_len=length,
                num_pages=num_pages,
                weight_bytes=0,
                kv_cache_bytes=0,
            ),
            num_slots=num_slots_for(batch),
            pages_per_seq=pages_for(length),
            max_step_tokens=MAX_NUM_BATCHED_TOKENS,
            pinned=False,
        )
        self.frames = pipes.receiver("detokenizer.0", ToDetokenizer)
        self.outbox = Outbox(pipes=pipes, detokenizers=1)
        limits = QueueLimits(10_000, 2**24)
        self.inbox = Inbox(pipes=pipes, scheduler=self.scheduler, outbox=self.outbox, vocab_size=VOCAB, limits=limits)
        self.account = StepAccount(RingWriter(run_dir, "gpu_runner", 0, StepRecord))
        self._in_flight: deque[StepPlan] = deque()

    def turn(self) -> Turn:
        clock, account, scheduler, in_flight = time.perf_counter, self.account, self.scheduler, self._in_flight
        result, output = None, None
        self.device.waited_s = 0.0
        marks = [clock()]
        account.enter(DRAIN)
        self.inbox.drain()
        self.outbox.flush()
        marks.append(clock())
        account.enter(PLAN)
        plan = scheduler.plan()
        marks.append(clock())
        if plan is not None:
            account.enter(LAUNCH)
            self.executor.launch(plan)
            in_flight.append(plan)
        collects = bool(in_flight) and (plan is None or len(in_flight) == MAX_IN_FLIGHT)
        if collects:
            account.enter(WAIT)
            result = self.executor.collect()
        marks.append(clock())
        if result is not None:
            account.enter(COMMIT)
            output = scheduler.commit(in_flight.popleft(), result)
        marks.append(clock())
        if output is not None:
            account.enter(SEND)
            self.outbox.send(output)
        marks.append(clock())
        account.end_turn(plan, result, running=scheduler.num_running, waiting=len(scheduler.queue))
        marks.append(clock())
        for _ in self.frames.drain():
            pass
        seconds = [end - begin for begin, end in itertools.pairwise(marks)]
        seconds[PARTS.index("pack")] -= self.device.waited_s
        return Turn(plan, output, seconds)


def _no_model(length: int) -> ModelConfig:
    return ModelConfig(
        architecture="none",
        vocab_size=VOCAB,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-5,
        rope=RopeConfig(base=1e4),
        layer_windows=(None,),
        max_position=length,
        eos_ids=(),
        source="bench_host",
    )


@contextmanager
def a_host(batch: int, length: int, device: NoDevice, *, caching: bool = True) -> Iterator[tuple[Host, Sender]]:
    """And the pipe that requests come by. Garbage is not collected meanwhile."""
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    try:
        host = Host(batch, length, device, run_dir, pipes, caching=caching)
        gc.collect()
        gc.disable()
        yield host, pipes.sender("runner.requests")
    finally:
        gc.enable()
        pipes.close()
        shutil.rmtree(run_dir)


def measure(batch: int, steps: int, device: NoDevice) -> dict[str, float]:
    """Median of each part and of their sum, and the sum's 99th percentile, over `steps` decode steps of `batch`."""
    times = 1e6 * np.array(_steady_steps(batch, steps, device))
    step = times.sum(axis=1)
    row = {"batch": batch} | {f"{part}_us": float(np.median(times[:, column])) for column, part in enumerate(PARTS)}
    return row | {"step_us": float(np.median(step)), "step_us_p99": float(np.percentile(step, 99))}


def _steady_steps(batch: int, steps: int, device: NoDevice) -> list[list[float]]:
    """Seconds of each of `PARTS`, for each step of which all rows decode."""
    # rows start over several prefill steps, so the first has decoded for a while before the last joins
    longest = PROMPT_TOKENS + PAGE_SIZE
    length = longest + steps + 2 * batch * longest // MAX_NUM_BATCHED_TOKENS + PAGE_SIZE
    rng = np.random.default_rng(0)
    max_tokens = length - longest
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    times: list[list[float]] = []
    with a_host(batch, length, device) as (host, _):
        for rid in range(batch):
            prompt = rng.integers(0, VOCAB, PROMPT_TOKENS + rid % PAGE_SIZE, dtype=np.int32)
            host.scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=max_tokens)
        while len(times) < steps:
            turn = host.turn()
            if turn.plan is not None and turn.plan.num_decode_rows == batch:
                times.append(turn.seconds)
    return times


class Requests:
    """What a client sends: prompts of about `MEAN_PROMPT_TOKENS`, of one of the kinds in `TURNOVERS`."""

    def __init__(self, kind: str, sender: Sender) -> None:
        self._rng = np.random.default_rng(0)
        self._prefixes = self._rng.integers(0, VOCAB, (SHARED_PREFIXES, SHARED_TOKENS), dtype=np.int32)
        self._shared = kind == "shared"
        self._sender = sender
        self._next_rid = 0

    def send(self, max_tokens: int) -> None:
        rid = self._next_rid
        self._next_rid += 1
        prompt = self._rng.integers(0, VOCAB, self._rng.integers(-PAGE_SIZE, PAGE_SIZE) + MEAN_PROMPT_TOKENS, np.int32)
        if self._shared:
            prompt[:SHARED_TOKENS] = self._prefixes[rid % SHARED_PREFIXES]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9)
        self._sender.send(Generate(rid, prompt.tobytes(), params, max_tokens, b"", ""))


def measure_turnover(kind: str, batch: int, steps: int, device: NoDevice) -> dict[str, Any]:
    """Median and 99th percentile of each part over the steps in which rows join or leave, once all that were there at
    first have ended."""
    times: list[list[float]] = []
    joined: list[int] = []
    turns = due = 0
    group = GROUP if kind == "grouped" else 1
    with a_host(batch, LONGEST, device, caching=kind != "uncached") as (host, sender):
        requests = Requests(kind, sender)
        for index in range(batch):
            requests.send(1 + ANSWER_TOKENS * (index + 1) // batch)
        while len(times) < steps:
            turn = host.turn()
            turns += 1
            ended = 0 if turn.output is None else int(np.count_nonzero(turn.output.finish))
            started = 0 if turn.plan is None else len(turn.plan.start)
            if turns > 2 * ANSWER_TOKENS and (ended or started):
                times.append(turn.seconds)
                joined.append(started)
            due += ended
            while due >= group:
                due -= group
                for _ in range(group):
                    requests.send(ANSWER_TOKENS)
    row: dict[str, Any] = {"kind": kind, "joined": float(np.mean(joined))}
    for name, column in _columns(times).items():
        row |= {f"{name}_us": float(np.median(column)), f"{name}_us_p99": float(np.percentile(column, 99))}
    return row


def measure_burst(kind: str, batch: int, device: NoDevice) -> dict[str, Any]:
    """`batch` requests come at once: what each part takes until all have started, divided by their number, and the
    longest one of it. Medians of a few bursts."""
    bursts = [_burst(kind, batch, device) for _ in range(BURSTS)]
    return {"kind": kind} | {name: float(np.median([burst[name] for burst in bursts])) for name in bursts[0]}


def _burst(kind: str, batch: int, device: NoDevice) -> dict[str, float]:
    times: list[list[float]] = []
    started = 0
    with a_host(batch, LONGEST, device, caching=kind != "uncached") as (host, sender):
        requests = Requests(kind, sender)
        for _ in range(batch):
            requests.send(ANSWER_TOKENS)
        time.sleep(BURST_ARRIVES_SECONDS)
        while started < batch:
            sender.flush()
            turn = host.turn()
            times.append(turn.seconds)
            started += 0 if turn.plan is None else len(turn.plan.start)
    row: dict[str, float] = {"steps": len(times)}
    for name, column in _columns(times).items():
        row |= {f"{name}_us": float(column.sum()) / batch, f"{name}_us_max": float(column.max())}
    return row


def _columns(times: list[list[float]]) -> dict[str, np.ndarray]:
    """Microseconds of each part, and of their sum, [len(times)] each. times: seconds, as of `Turn`."""
    parts = 1e6 * np.array(times)
    return dict(zip(PARTS, parts.T, strict=True)) | {"step": parts.sum(axis=1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="decode steps measured per batch size")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--wait-ms", type=float, default=0.0, help="what a step takes on the device")
    parser.add_argument("--evict-mb", type=int, default=0, help="memory touched during each step")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    device = partial(NoDevice, args.wait_ms, args.evict_mb)
    rows: list[dict[str, Any]] = [measure(int(batch), args.steps, device()) for batch in args.batches.split(",")]
    columns = [*(f"{part}_us" for part in PARTS), "step_us", "step_us_p99"]
    print(f"{'batch':>6}" + "".join(f"{column:>12}" for column in columns))
    for row in rows:
        print(f"{row['batch']:>6}" + "".join(f"{row[column]:>12.1f}" for column in columns))
    print(f"{rows[-1]['batch']} rows cost {rows[-1]['step_us'] / rows[0]['step_us']:.2f} times {rows[0]['batch']}")
    batch = rows[-1]["batch"]
    turnovers = [measure_turnover(kind, batch, args.steps, device()) for kind in TURNOVERS]
    print(f"\nrows join and leave, {batch} run: median and p99, us a step")
    _print_pairs(turnovers, "joined", "p99")
    bursts = [measure_burst(kind, batch, device()) for kind in TURNOVERS if kind != "grouped"]
    print(f"\n{batch} requests come at once: us for each of them, and the longest single time")
    _print_pairs(bursts, "steps", "max")
    if args.json:
        args.json.write_text(json.dumps({"steady": rows, "turnover": turnovers, "burst": bursts}, indent=2))


def _print_pairs(rows: list[dict[str, Any]], count: str, second: str) -> None:
    """Two figures for each part: `part`_us and `part`_us_`second`."""
    names = [*PARTS, "step"]
    print(f"{'':>9}{count:>8}" + "".join(f"{name + '_us':>11}{second:>7}" for name in names))
    for row in rows:
        pairs = "".join(f"{row[f'{name}_us']:>11.1f}{row[f'{name}_us_{second}']:>7.0f}" for name in names)
        print(f"{row['kind']:>9}{row[count]:>8.1f}{pairs}")


if __name__ == "__main__":
    main()
