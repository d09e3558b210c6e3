"""What a running server costs while nobody uses it, what requests leave behind, and who answers beside long prompts.

    asyncengine serve & python scripts/bench_upkeep.py --pid $! [--url URL] [--seconds 10] [--requests 20000]

Three tables, of all processes of the server whose process id is given:

    idle      processor time, as a share of one core, and how often a second its threads wake up
    requests  resident memory after a tenth of the requests and after all of them, and the bytes that each of those
              between has left. They are of a few tokens; every tenth is left by its client before its end
    beside    GET /health while `--prompts` texts of `--words` words are encoded at once, and the gaps of a stream; how
              many they are of, and the same in peace
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np
from recovery.server_processes import descendants

CLIENTS = 32
LEAVES = 10
"""Of so many clients one goes before it has its answer."""
WARM_UP = 0.1
SHORT = {"prompt": [40, 41, 42], "max_tokens": 3, "ignore_eos": True}
STREAM = {"prompt": [40, 41, 42], "max_tokens": 1500, "ignore_eos": True, "stream": True}
HEALTH_SECONDS = 0.01


def name_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return (words[words.index(b"-m") + 1] if b"-m" in words else words[1]).decode().rpartition("/")[2]


def cpu_and_wake_ups(pid: int) -> tuple[float, int]:
    cpu, wake_ups = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu += int((task / "schedstat").read_text().split()[0])
        wake_ups += int(re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text())[0])
    return cpu / 1e9, wake_ups


def resident_bytes(pid: int) -> int:
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def idle(pids: list[int], seconds: float) -> None:
    before = [cpu_and_wake_ups(pid) for pid in pids]
    time.sleep(seconds)
    print(f"{'idle':<28} {'% core':>8} {'wake-ups/s':>11}")
    total = 0.0
    for pid, (cpu, wake_ups) in zip(pids, before, strict=True):
        cpu_now, wake_ups_now = cpu_and_wake_ups(pid)
        share = 100 * (cpu_now - cpu) / seconds
        total += share
        print(f"{name_of(pid):<28} {share:>8.2f} {(wake_ups_now - wake_ups) / seconds:>11.0f}")
    print(f"{'all':<28} {total:>8.2f}\n")


async def ask(http: aiohttp.ClientSession, number: int) -> None:
    async with http.post("/v1/completions", json=SHORT | {"stream": number % LEAVES == 0}) as response:
        response.raise_for_status()
        if number % LEAVES == 0:
            await response.content.readany()
            response.close()
        else:
            await response.read()


async def requests(http: aiohttp.ClientSession, pids: list[int], count: int) -> None:
    numbers = iter(range(count))

    async def client(until: int) -> None:
        for number in numbers:
            await ask(http, number)
            if number >= until:
                return

    warm = int(WARM_UP * count)
    began = time.monotonic()
    await asyncio.gather(*(client(warm) for _ in range(CLIENTS)))
    before = [resident_bytes(pid) for pid in pids]
    await asyncio.gather(*(client(count) for _ in range(CLIENTS)))
    rate = count / (time.monotonic() - began)
    print(f"{f'{count} requests, {rate:.0f}/s':<28} {'MiB':>8} {'then':>8} {'bytes/request':>14}")
    for pid, first in zip(pids, before, strict=True):
        now = resident_bytes(pid)
        mib = [size / 2**20 for size in (first, now)]
        print(f"{name_of(pid):<28} {mib[0]:>8.1f} {mib[1]:>8.1f} {(now - first) / (count - warm):>14.1f}")
    print()


async def beside(http: aiohttp.ClientSession, prompts: int, words: int) -> None:
    long = {"prompt": "word " * words, "max_tokens": 1}

    async def prompt() -> int:
        async with http.post("/v1/completions", json=long) as response:
            await response.read()
            return response.status

    async def peace() -> None:
        await asyncio.sleep(2)

    async def burst() -> None:
        print(f"answers to the prompts: {sorted(await asyncio.gather(*(prompt() for _ in range(prompts))))}")

    await watched(http, "in peace", peace)
    await watched(http, f"beside {prompts} x {words} words", burst)


async def watched(http: aiohttp.ClientSession, name: str, during: Callable[[], Awaitable[None]]) -> None:
    health, gaps, over = list[float](), list[float](), asyncio.Event()

    async def look() -> None:
        while not over.is_set():
            began = time.monotonic()
            async with http.get("/health") as response:
                if response.status != 200:
                    raise SystemExit(f"/health was {response.status}")
            health.append(1e3 * (time.monotonic() - began))
            await asyncio.sleep(HEALTH_SECONDS)

    async with http.post("/v1/completions", json=STREAM) as stream:
        await stream.content.readany()

        async def read() -> None:
            came = time.monotonic()
            while not over.is_set() and await stream.content.readany():
                now = time.monotonic()
                gaps.append(1e3 * (now - came))
                came = now

        watching = [asyncio.create_task(look()), asyncio.create_task(read())]
        await during()
        over.set()
        await watching[0]
        watching[1].cancel()
        stream.close()
    line = " ".join(
        f"{what} {len(of)}: p50 {np.percentile(of, 50):.1f} p99 {np.percentile(of, 99):.1f} max {max(of):.1f} ms;"
        for what, of in (("/health", health), ("gaps", gaps))
    )
    print(f"{name}: {line}")


async def measure(args: argparse.Namespace) -> None:
    pids = [args.pid, *descendants(args.pid)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(args.url, connector=connector, timeout=timeout) as http:
        await ask(http, 1)
        await asyncio.sleep(1)
        idle(pids, args.seconds)
        await requests(http, pids, args.requests)
        await beside(http, args.prompts, args.words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idleness (default: %(default)g)")
    parser.add_argument("--requests", type=int, default=20000, help="(default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--words", type=int, default=80000, help="of each (default: %(default)s)")
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
