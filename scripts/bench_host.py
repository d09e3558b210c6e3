"""What one step costs the host, without a model or a GPU: microseconds by part of the loop and batch size.

    python scripts/bench_host.py [--steps 2000] [--batches 1,64,512] [--wait-ms 3] [--evict-mb 4] [--json out.json]

Every row decodes: the steady state, where the cost should hardly depend on the batch. In one of 16 steps each row takes
a page from the pool: medians are those of the others, the 99th percentile shows it. Results are made up (no row ends),
two steps in flight as in the real loop.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncengine.config import PAGE_SIZE
from asyncengine.sampling import SamplingParams
from asyncengine.wire.accounting import RingWriter, StepRecord
from asyncengine.wire.frames import ToDetokenizer
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.reports import RunnerInfo
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

BATCHES = (1, 64, 256, 512, 1024)
PARTS = ("drain", "plan", "pack", "commit", "send", "account")
PROMPT_TOKENS = 64
MAX_NUM_BATCHED_TOKENS = 8192
VOCAB = 50_000


class NoDevice:
    """Step, stream and mark of a device that computes nothing. Its results are all token 0, not finished.

    wait_ms, evict_mb: how long results take, and how much memory is touched meanwhile.
    """

    def __init__(self, wait_ms: float = 0.0, evict_mb: int = 0) -> None:
        self._wait_s = wait_ms / 1e3
        self._evicting = np.zeros(evict_mb << 17)
        self.waited_s = 0.0  # for the last result

    def connect(self, ring: Sequence[RingSlot], masks: TokenMasks) -> None:
        for slot in ring:
            slot.results.zero_()

    def run(self, step: PackedStep) -> None:
        pass

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
        while time.perf_counter() < begin + self._wait_s:
            pass
        self.waited_s = time.perf_counter() - begin

    def done(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Host:
    """All that the loop calls, for `batch` rows of up to `length` tokens."""

    def __init__(self, batch: int, length: int, device: NoDevice, run_dir: Path, pipes: Pipes) -> None:
        num_pages = 1 + batch * pages_for(length)
        self.scheduler = Scheduler(
            num_pages=num_pages,
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
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


def measure(batch: int, steps: int, device: NoDevice) -> dict[str, float]:
    """Median of each part and of their sum, and the sum's 99th percentile, over `steps` decode steps of `batch`."""
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    try:
        times = 1e6 * np.array(_steady_steps(batch, steps, device, run_dir, pipes))
    finally:
        pipes.close()
        shutil.rmtree(run_dir)
    step = times.sum(axis=1)
    row = {"batch": batch} | {f"{part}_us": float(np.median(times[:, column])) for column, part in enumerate(PARTS)}
    return row | {"step_us": float(np.median(step)), "step_us_p99": float(np.percentile(step, 99))}


def _steady_steps(batch: int, steps: int, device: NoDevice, run_dir: Path, pipes: Pipes) -> list[list[float]]:
    """Seconds of each of `PARTS`, for each step of which all rows decode."""
    # rows start over several prefill steps, so the first has decoded for a while before the last joins
    longest = PROMPT_TOKENS + PAGE_SIZE
    length = longest + steps + 2 * batch * longest // MAX_NUM_BATCHED_TOKENS + PAGE_SIZE
    host = Host(batch, length, device, run_dir, pipes)
    scheduler, account = host.scheduler, host.account
    rng = np.random.default_rng(0)
    max_tokens = length - longest
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for rid in range(batch):
        prompt = rng.integers(0, VOCAB, PROMPT_TOKENS + rid % PAGE_SIZE, dtype=np.int32)
        host.scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=max_tokens)
    times: list[list[float]] = []
    in_flight: deque[StepPlan] = deque()
    gc.collect()
    gc.disable()
    clock = time.perf_counter
    while len(times) < steps:
        marks = [clock()]
        account.enter(DRAIN)
        host.inbox.drain()
        host.outbox.flush()
        marks.append(clock())
        account.enter(PLAN)
        plan = scheduler.plan()
        assert plan is not None
        marks.append(clock())
        account.enter(LAUNCH)
        host.executor.launch(plan)
        in_flight.append(plan)
        if len(in_flight) < MAX_IN_FLIGHT:
            continue
        account.enter(WAIT)
        result = host.executor.collect()
        marks.append(clock())
        account.enter(COMMIT)
        output = scheduler.commit(in_flight.popleft(), result)
        marks.append(clock())
        account.enter(SEND)
        host.outbox.send(output)
        marks.append(clock())
        account.end_turn(plan, result, running=scheduler.num_running, waiting=len(scheduler.queue))
        marks.append(clock())
        if plan.num_decode_rows == batch:
            times.append([end - begin for begin, end in itertools.pairwise(marks)])
            times[-1][PARTS.index("pack")] -= device.waited_s
        for _ in host.frames.drain():
            pass
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="decode steps measured per batch size")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--wait-ms", type=float, default=0.0, help="what a step takes on the device")
    parser.add_argument("--evict-mb", type=int, default=0, help="memory touched during each step")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [
        measure(int(batch), args.steps, NoDevice(args.wait_ms, args.evict_mb)) for batch in args.batches.split(",")
    ]
    columns = [*(f"{part}_us" for part in PARTS), "step_us", "step_us_p99"]
    print(f"{'batch':>6}" + "".join(f"{column:>12}" for column in columns))
    for row in rows:
        print(f"{row['batch']:>6}" + "".join(f"{row[column]:>12.1f}" for column in columns))
    print(f"{rows[-1]['batch']} rows cost {rows[-1]['step_us'] / rows[0]['step_us']:.2f} times {rows[0]['batch']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
