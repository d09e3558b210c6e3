"""Kills processes of a running server and tells what became of its streams and of the GPU's memory.

    python scripts/check_recovery.py --url http://127.0.0.1:8000 --pid PID [--streams 64] [--require-equal]
        [--json out.json]

PID is the server's process. The server is one of this project, on this machine, with a GPU to itself where there is
one; it is gone at the end, for these are killed (SIGKILL):

    gpu_runner   while the streams run. Each must go on and end once, with as many tokens as it asked for, by its ids
                 and by its usage, which read what its text says; and each token must be one that the model would
                 choose after those before it, within --tolerance, as the server says when asked (`greedy_proof.py`).
    server       while the streams run. All its processes must be gone, and the GPU's memory free, within 5 seconds.

    text equal   streams with the text of a run in peace: all of them in float32, or where batches change no bit, and
                 then --require-equal makes it a condition. In bfloat16 tokens that were decoded are prefilled after the
                 loss, which rounds otherwise, and a model of random weights goes another way at the next near tie.
    in peace     the same of a second run in peace
    gap          by how many nats a token was less likely than the best at most, and so in peace
    control      of so many streams, those in which a token dropped before the kill would have been found, and the
                 median of the gaps that would have told it
    back s       from the kill to the end of the silence of the first stream, and of the last; of the server to the end
                 of its last process, and until the memory is free
    GPU MiB      in use, of the whole GPU, before and after

Exits with 1 if anything of this failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from recovery.followed_streams import Streams
from recovery.greedy_proof import Proof, ServerModel
from recovery.server_processes import descendants, gpu_mib, gpu_runner, runs

from asyncengine.bench.command import vocabulary
from asyncengine.client import AsyncClient

GONE_SECONDS = 5.0
FREE_SHARE = 0.05
"""Of the memory that was in use; less is as good as none."""
POLL_SECONDS = 0.05
TOLERANCE = 0.5
"""Several times what bfloat16 rounds away: logits from 4 to 8 are 1/32 apart, and of 300 tokens of 8 layers of width
4096 the farthest was 3/32 behind the best. A small part of what a wrong token costs: behind a dropped one the farthest
of 40 was behind by 4 to 7."""
WAIT_SECONDS = 30.0
"""For what should take no more than `GONE_SECONDS`."""


async def seconds_until(condition: Any, since: float) -> float | None:
    """None if it does not come true in `WAIT_SECONDS`."""
    while not await asyncio.to_thread(condition):
        if time.monotonic() - since > WAIT_SECONDS:
            return None
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - since


def random_prompts(count: int, tokens: int, vocab: tuple[int, int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(*vocab, tokens).tolist() for _ in range(count)]


async def check(args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = random_prompts(args.streams, args.prompt, args.vocab, args.seed)
    async with AsyncClient(args.url) as client, aiohttp.ClientSession() as http:
        model = ServerModel(http, args.url)
        peace, again = (Streams(client, prompts, args.tokens) for _ in range(2))
        for streams in (peace, again):
            await streams.run()
            if faults := streams.faults(await model.texts(streams.answers)):
                raise SystemExit(f"{len(faults)} faults of {args.streams} streams in peace: {faults[0]}")
        rows = [await kill_gpu_runner(args, Streams(client, prompts, args.tokens), peace, again, model)]
        print(line(rows[-1]), flush=True)
        rows.append(await kill_server(args, Streams(client, prompts, args.tokens)))
        print(line(rows[-1]), flush=True)
    return rows


async def kill_gpu_runner(
    args: argparse.Namespace, streams: Streams, peace: Streams, again: Streams, model: ServerModel
) -> dict[str, Any]:
    pid, before = gpu_runner(args.pid), gpu_mib()
    if pid is None:
        raise SystemExit(f"process {args.pid} has no gpu_runner")
    running = await streams.kill_amid(pid)
    await running
    after = gpu_mib()
    failures = streams.faults(await model.texts(streams.answers))
    gap: list[float] | None = None
    control: dict[str, Any] | None = None
    if not failures:
        lost, kept = [await model.prove(each.answers[: args.proven]) for each in (streams, peace)]
        failures = lost.faults(args.tolerance)
        gap, control = [max(lost.gaps), max(kept.gaps)], control_of(lost, args.tolerance)
    equal = streams.equal(peace)
    if args.require_equal and equal < len(streams.answers):
        failures.append(f"{len(streams.answers) - equal} streams differ from those in peace")
    back = streams.back()
    if before is not None and (after is None or abs(after - before) > max(512, FREE_SHARE * before)):
        failures.append("the GPU's memory is not what it was")
    return {
        "killed": "gpu_runner",
        "streams": len(streams.answers),
        "equal": equal,
        "equal_in_peace": again.equal(peace),
        "gap": gap,
        "control": control,
        "failures": failures[:3],
        "back_s": [back[0], back[-1]] if back else None,
        "gpu_mib": [before, after],
        "ok": not failures,
    }


def control_of(proof: Proof, tolerance: float) -> dict[str, Any]:
    return {
        "found": proof.found(tolerance),
        "of": len(proof.shortened),
        "median_gap": float(np.median(proof.shortened)),
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
        "streams": len(streams.answers),
        "equal": None,
        "equal_in_peace": None,
        "gap": None,
        "control": None,
        "failures": [],
        "back_s": took,
        "gpu_mib": [before, gpu_mib()],
        "ok": all(seconds is not None and seconds <= GONE_SECONDS for seconds in took),
    }


COLUMNS = ("text equal", "in peace", "gap", "control", "back s", "GPU MiB")
WIDTHS = (12, 12, 18, 18, 16, 18)


def cells(row: dict[str, Any]) -> list[str]:
    """As `COLUMNS`."""
    control = row["control"]
    return [
        *("-" if row[key] is None else f"{row[key]} of {row['streams']}" for key in ("equal", "equal_in_peace")),
        ", ".join(f"{gap:.2g}" for gap in row["gap"] or ()) or "-",
        "-" if control is None else f"{control['found']} of {control['of']}, {control['median_gap']:.2g}",
        ", ".join("never" if each is None else f"{each:.2f}" for each in row["back_s"] or [None]),
        " -> ".join("-" if each is None else str(each) for each in row["gpu_mib"]),
    ]


def line(row: dict[str, Any]) -> str:
    failed = "".join(f"; {failure}" for failure in row["failures"])
    return f"{row['killed']:<12}{aligned(cells(row))}   {'ok' if row['ok'] else 'FAILED'}{failed}"


def aligned(texts: Iterable[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="the server's process")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--vocab", type=vocabulary, default=(1000, 32000), help="ids of prompts, LOW:HIGH")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--proven", type=int, default=16, help="streams whose tokens are computed once more")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of the gap, in nats (default: %(default)s)")
    parser.add_argument("--require-equal", action="store_true", help="each stream must have the text it has in peace")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{'killed':<12}{aligned(COLUMNS)}")
    rows = asyncio.run(check(args))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
