"""What must hold once all clients have left, and when the server has ended."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass

from chaos.exchange import Client
from chaos.processes import ON_DEMAND, Process, count_roles, exists, family
from chaos.server import Server, Setup

SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.2
GONE_SECONDS = 60.0
LOOKS_PER_WORKER = 8
"""Connections go to API workers as it happens; with so many looks each of them is seen."""
FDS_OF_CONNECTION = 2
"""Of one of a text process to an API worker, which is made when it is first needed."""
TEXT_ROLES = ("tokenizer_proc", "detokenizer_proc")
RSS_SLACK_BYTES = 48 * 2**20
RSS_SLACK_SHARE = 0.15
"""What a process may hold more than its role did before, the larger of both: memory that its allocator keeps after the
most streams it ever had at once."""


@dataclass(frozen=True)
class Baseline:
    """Of each role, what its process with the most had."""

    fds: dict[str, int]
    rss_bytes: dict[str, int]


def baseline_of(processes: list[Process]) -> Baseline:
    fds: dict[str, int] = {}
    rss: dict[str, int] = {}
    for process in processes:
        fds[process.role] = max(fds.get(process.role, 0), process.fds)
        rss[process.role] = max(rss.get(process.role, 0), process.rss_bytes)
    return Baseline(fds, rss)


async def settled(server: Server, setup: Setup, client: Client, baseline: Baseline | None = None) -> list[str]:
    """Wait for all that must hold when nothing runs; what does not after `SETTLE_SECONDS`. baseline: what processes may
    hold."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (
        (problems := [*_process_problems(family(server.pid), setup, baseline), *await _gauge_problems(setup, client)])
        and time.monotonic() < deadline
        and exists(server.pid)
    ):
        await asyncio.sleep(POLL_SECONDS)
    return problems


async def ended(server: Server) -> list[str]:
    """Stop the server; what is wrong with its end."""
    pids = [process.pid for process in family(server.pid)]
    try:
        code = await server.stop()
    except TimeoutError:
        return ["the server does not end after SIGTERM"]
    problems = [] if code == 0 else [f"after SIGTERM the exit code is {code}, expected 0"]
    deadline = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in pids if exists(pid)]) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)
    if left:
        problems.append(f"processes {left} are left after the server's end")
    if names := server.left_behind():
        problems.append(f"files are left after the server's end: {names}")
    return problems


def _process_problems(processes: list[Process], setup: Setup, baseline: Baseline | None) -> list[str]:
    problems = []
    counts = {role: count for role, count in count_roles(processes).items() if role not in ON_DEMAND}
    if counts != setup.roles:
        problems.append(f"processes are {counts}, expected {setup.roles}")
    for process in processes:
        name = f"{process.role} (process {process.pid})"
        if process.state in "TZ":
            problems.append(f"{name} is in state {process.state}")
        if baseline is None or process.role not in baseline.fds:
            continue
        # Whether in peace each text process had answers for each API worker is chance.
        unseen = FDS_OF_CONNECTION * (setup.api_workers - 1) if process.role in TEXT_ROLES else 0
        if process.fds > baseline.fds[process.role] + unseen:
            problems.append(f"{name} has {process.fds} file descriptors, before {baseline.fds[process.role]}")
        before = baseline.rss_bytes[process.role]
        if process.rss_bytes > before + max(RSS_SLACK_BYTES, RSS_SLACK_SHARE * before):
            problems.append(f"{name} holds {process.rss_bytes >> 20} MiB, before {before >> 20} MiB")
    return problems


async def _gauge_problems(setup: Setup, client: Client) -> list[str]:
    ready = await client.get("/ready")
    if ready.status != 200:
        return [f"/ready says {ready.status} {ready.broken} {ready.body.decode(errors='replace')}"]
    metrics = (await client.get("/metrics")).body.decode()
    running, waiting = _gauge(metrics, "vllm:num_requests_running"), _gauge(metrics, "vllm:num_requests_waiting")
    problems = [] if running == waiting == 0 else [f"{running} requests are running and {waiting} waiting"]
    if (pinned := _gauge(metrics, "asyncengine:session_pinned_pages")) > 0:
        problems.append(f"{pinned} pages are kept for sessions, all of which have ended")
    pages = [_gauge(metrics, f"asyncengine:kv_cache_{name}pages") for name in ("free_", "cached_", "")]
    if pages[0] + pages[1] != pages[2]:
        problems.append(f"{pages[0]} pages are free and {pages[1]} cached, of {pages[2]}")
    for _ in range(LOOKS_PER_WORKER * setup.api_workers if setup.api_workers > 1 else 1):
        reply = await client.get("/console/timeline?since=")
        if reply.status == 200 and (streams := json.loads(reply.body)["gauges"]["open_streams"]):
            return [*problems, f"{streams} streams are open"]
        await asyncio.sleep(1 / 30)  # as often as it may be asked
    return problems


def _gauge(metrics: str, name: str) -> int:
    found = re.search(rf"^{name}{{[^}}]*}} (\d+)$", metrics, re.MULTILINE)
    return int(found[1]) if found else -1
