"""Kills processes of a running server and tells what became of its streams and of the GPU's memory.

    python scripts/check_recovery.py --url http://127.0.0.1:8000 --pid PID [--streams 64] [--json out.json]

PID is the server's process. The server is one of this project, on this machine, with a GPU to itself where there is
one; it is gone at the end, for these are killed (SIGKILL):

    gpu_runner   while the streams run. Each must go on and end with the text that it has in peace.
    server       while the streams run. All its processes must be gone, and the GPU's memory free, within 5 seconds.

    back s       from the kill to the end of the silence of the first stream, and of the last; of the server to the end
                 of its last process, and until the memory is free
    GPU MiB      in use, of the whole GPU, before and after

Exits with 1 if anything of this failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncengine.bench.command import vocabulary
from asyncengine.client import AsyncClient
from asyncengine.errors import EngineError
from asyncengine.sampling import SamplingParams

GPU_RUNNERS = (b"gpu_runner",)
"""Modules that are run as one."""
GONE_SECONDS = 5.0
FREE_SHARE = 0.05
"""Of the memory that was in use; less is as good as none."""
POLL_SECONDS = 0.05
DELTAS_BEFORE = 3
WAIT_SECONDS = 30.0
"""For what should take no more than `GONE_SECONDS`."""


class Streams:
    """texts: what came of each. deltas: of all. after: by stream, when output came after the kill, in seconds."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]], tokens: int) -> None:
        self.texts = [""] * len(prompts)
        self.deltas = 0
        self.killed_at: float | None = None
        self.after: list[list[float]] = [[] for _ in prompts]
        self._client = client
        self._prompts = prompts
        self._params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    async def run(self) -> list[str]:
        """Until all have ended; what went wrong, "" for nothing."""
        return await asyncio.gather(*(self._read(place) for place in range(len(self._prompts))))

    async def _read(self, place: int) -> str:
        try:
            async for delta in self._client.generate(self._prompts[place], self._params):
                if self.killed_at is not None:
                    self.after[place].append(time.monotonic() - self.killed_at)
                self.texts[place] += delta.text
                self.deltas += 1
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def back(self) -> list[float]:
        """When each stream went on, ascending: at the end of its longest silence, since what had left gpu_runner before
        the kill still comes after it."""
        ends = []
        for times in self.after:
            if times:
                ends.append(max(zip([0.0, *times], times, strict=False), key=lambda gap: gap[1] - gap[0])[1])
        return sorted(ends)

    async def kill_amid(self, pid: int) -> asyncio.Task[list[str]]:
        """Start all and kill the process once each has had some output on average; `run` goes on."""
        running = asyncio.create_task(self.run())
        while self.deltas < DELTAS_BEFORE * len(self.texts):
            if running.done():
                raise SystemExit("the streams ended before anything could be killed: more --tokens are needed")
            await asyncio.sleep(POLL_SECONDS / 10)
        os.kill(pid, signal.SIGKILL)
        self.killed_at = time.monotonic()
        return running


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def gpu_runner(server: int) -> int | None:
    for pid in descendants(server):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"-m" in words and words[words.index(b"-m") + 1] in GPU_RUNNERS:
            return pid
    return None


def gpu_mib() -> int | None:
    """In use of the first GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return int(answer.stdout.split()[0]) if answer.returncode == 0 else None


async def seconds_until(condition: Any, since: float) -> float | None:
    """None if it does not come true in `WAIT_SECONDS`."""
    while not await asyncio.to_thread(condition):
        if time.monotonic() - since > WAIT_SECONDS:
            return None
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - since


async def check(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    low, high = args.vocab
    prompts: list[list[int]] = [rng.integers(low, high, args.prompt).tolist() for _ in range(args.streams)]
    async with AsyncClient(args.url) as client:
        peace = Streams(client, prompts, args.tokens)
        if failures := [failure for failure in await peace.run() if failure]:
            raise SystemExit(f"{len(failures)} of {args.streams} streams failed in peace: {failures[0]}")
        rows = [await kill_gpu_runner(args, Streams(client, prompts, args.tokens), peace)]
        print(line(rows[-1]), flush=True)
        rows.append(await kill_server(args, Streams(client, prompts, args.tokens)))
        print(line(rows[-1]), flush=True)
    return rows


async def kill_gpu_runner(args: argparse.Namespace, streams: Streams, peace: Streams) -> dict[str, Any]:
    pid, before = gpu_runner(args.pid), gpu_mib()
    if pid is None:
        raise SystemExit(f"process {args.pid} has no gpu_runner")
    running = await streams.kill_amid(pid)
    failures = [failure for failure in await running if failure]
    after = gpu_mib()
    equal = sum(a == b for a, b in zip(streams.texts, peace.texts, strict=True))
    back = streams.back()
    memory_is_back = before is None or (after is not None and abs(after - before) <= max(512, FREE_SHARE * before))
    return {
        "killed": "gpu_runner",
        "streams": len(streams.texts),
        "equal": equal,
        "failures": failures[:3],
        "back_s": [back[0], back[-1]] if back else None,
        "gpu_mib": [before, after],
        "ok": equal == len(streams.texts) and not failures and memory_is_back,
    }


async def kill_server(args: argparse.Namespace, streams: Streams) -> dict[str, Any]:
    family, before = [args.pid, *descendants(args.pid)], gpu_mib()
    running = await streams.kill_amid(args.pid)
    since = time.monotonic()
    gone = await seconds_until(lambda: not any(map(runs, family)), since)
    free: float | None = None
    if before is not None:
        free = await seconds_until(lambda: (gpu_mib() or 0) <= FREE_SHARE * before, since)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    took = [gone] if before is None else [gone, free]
    return {
        "killed": "server",
        "streams": len(streams.texts),
        "equal": None,
        "failures": [],
        "back_s": took,
        "gpu_mib": [before, gpu_mib()],
        "ok": all(seconds is not None and seconds <= GONE_SECONDS for seconds in took),
    }


def line(row: dict[str, Any]) -> str:
    equal = "-" if row["equal"] is None else f"{row['equal']} of {row['streams']}"
    back = ", ".join("never" if each is None else f"{each:.2f}" for each in row["back_s"] or [None])
    memory = " -> ".join("-" if each is None else str(each) for each in row["gpu_mib"])
    failed = "".join(f"; {failure}" for failure in row["failures"])
    return f"{row['killed']:<12}{equal:>12}{back:>16}{memory:>18}   {'ok' if row['ok'] else 'FAILED'}{failed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="the server's process")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--vocab", type=vocabulary, default=(1000, 32000), help="ids of prompts, LOW:HIGH")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{'killed':<12}{'text equal':>12}{'back s':>16}{'GPU MiB':>18}")
    rows = asyncio.run(check(args))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
