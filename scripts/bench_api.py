"""What the HTTP path costs and how far it goes, without a model: tokens are replayed over the real sockets.

    python scripts/bench_api.py [--streams 64,256,512] [--steps-per-s 100,300] [--api-workers 1,2] [--json out.json]

A server is started with scripts/replay_runner.py in place of the model and the detokenizer; a client on raw sockets
keeps `streams` requests of `--lengths PROMPT:OUTPUT` tokens open in a closed loop and reads everything; outputs are 1
to twice OUTPUT long, so that they do not end together. A line for each combination, over `--seconds` after a warm-up:

    tok/s      tokens that reached the client; offered are streams x steps/s
    tok/event  tokens of one server-sent event: 1 unless the API process is behind, which merges them
    cpu        processor time of the API processes, in cores; the client's beside it (it should stay below 1)
    us/event, us/tok   processor time of the API processes for one event and one token, requests included
    late       from a token's step to its arrival at the client, of the oldest token in each arrival
    gap        between two arrivals of a stream: the engine's is 1000 / (steps/s) ms, so the difference is what clients
               see of the server's own work
    TTFT       from before the connection is made to the first token; a step's length is part of it
    share      connections of the least and the most loaded API process
    lost       streams that broke off, or ended with an error; with any, or where a process of the server was lost, what
               the line says is not to be used, and the exit code is 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from replay_runner import STAMP_BYTES

from asyncengine import __version__
from asyncengine.cli import allow_many_connections
from asyncengine.cli import main as asyncengine

SCRIPTS = Path(__file__).parent
WARM_UP_S = 1.5
READ_BYTES = 1 << 16
EVENT = b"data: {"
TEXT = b'"text":"'
DONE = b"[DONE]"
VOCAB = (1000, 32000)
DIFFERENT_LENGTHS = 997
SHOWN_LOG_CHARS = 4000
RESTARTS = "asyncengine:sidecar_restarts_total{"


class Client:
    """Keeps `streams` requests open; counts what arrives between `begin` and `end` (seconds of the monotonic clock)."""

    def __init__(
        self, address: tuple[str, int], requests: Sequence[bytes], streams: int, begin: float, end: float
    ) -> None:
        self._address, self._requests, self._streams = address, itertools.cycle(requests), streams
        self._begin, self._end = begin, end
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._sent: dict[int, float] = {}
        self._tails: dict[int, bytes] = {}
        self._came: dict[int, float] = {}
        self.events = self.tokens = self.requests = self.lost = 0
        self.late_ms: list[float] = []
        self.gap_ms: list[float] = []
        self.ttft_ms: list[float] = []

    def run(self) -> None:
        for _ in range(self._streams):
            self._open()
        while time.monotonic() < self._end:
            for fd, _ in self._poll.poll(0.1):
                self._read(fd)
        for connection in self._sockets.values():
            connection.close()

    def _open(self) -> None:
        sent = time.monotonic()
        connection = socket.create_connection(self._address)
        connection.sendall(next(self._requests))
        connection.setblocking(False)
        fd = connection.fileno()
        self._sockets[fd], self._sent[fd], self._tails[fd] = connection, sent, b""
        self._poll.register(fd, select.EPOLLIN)

    def _read(self, fd: int) -> None:
        try:
            data = self._sockets[fd].recv(READ_BYTES)
        except ConnectionError:
            data = b""
        now = time.monotonic()
        counted = self._begin <= now < self._end
        if data and counted:
            self._count(fd, data, now)
        ended = DONE in self._tails[fd] + data  # it may be cut in two
        self._tails[fd] = data[-len(DONE) :]
        if ended or not data:
            self.requests += counted and ended
            self.lost += not ended
            self._came.pop(fd, None)
            self._sockets.pop(fd).close()
            self._open()

    def _count(self, fd: int, data: bytes, now: float) -> None:
        if data.startswith(b"HTTP/"):
            data = data.partition(b"\r\n\r\n")[2]
        at = data.find(TEXT)
        if at >= 0 and (stamp := data[at + len(TEXT) : at + len(TEXT) + STAMP_BYTES - 1]).strip():
            with contextlib.suppress(ValueError):
                self.late_ms.append(1e3 * (now - float(stamp)))
        events = data.count(EVENT)
        self.events += events
        # every token is one stamp, and of the rest of an event only the server's version has points
        self.tokens += data.count(b".") - events * __version__.count(".")
        if events:
            if fd in self._came:
                self.gap_ms.append(1e3 * (now - self._came[fd]))
            self._came[fd] = now
        sent = self._sent.get(fd, 0.0)
        if sent and events:
            self._sent[fd] = 0.0
            if sent >= self._begin:
                self.ttft_ms.append(1e3 * (now - sent))


def completion_request(prompt_tokens: int, output_tokens: int) -> bytes:
    rng = np.random.default_rng(0)
    body = json.dumps(
        {
            "prompt": rng.integers(*VOCAB, prompt_tokens).tolist(),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def server(api_workers: int, streams: int, steps_per_s: float) -> Iterator[tuple[int, int, list[int]]]:
    """(pid, port, pids of the processes that serve HTTP). What it has logged is shown where something goes wrong."""
    workers = ["--api-workers", str(api_workers)] if api_workers > 1 else []
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "serve", "--port", "0", "--max-num-seqs", str(streams), *workers],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join((str(SCRIPTS.parent), str(SCRIPTS))),
                "ASYNCENGINE_REPLAY_STEP_MS": str(1e3 / steps_per_s),
            },
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready.startswith("Ready: "):
                raise SystemExit("the server did not start")
            yield process.pid, int(ready.rsplit(":", 1)[1]), api_pids(process.pid)
        except (SystemExit, OSError) as error:
            log.seek(0)
            print(log.read()[-SHOWN_LOG_CHARS:], file=sys.stderr)
            raise SystemExit(f"nothing was measured: {error}") from None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def api_pids(parent: int) -> list[int]:
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    workers = [pid for pid in children if b"api.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return workers or [parent]


def cpu_seconds(pid: int) -> float:
    """Processor time of all of a process's threads."""
    stats = [task.joinpath("schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


def connections(pids: list[int], port: int) -> list[int]:
    """Established connections to `port` of each process."""
    owners = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                owners[os.readlink(fd)] = pid
    count = Counter(dict.fromkeys(pids, 0))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, _, state, *rest = line.split()[1:]
        if state == "01" and int(local.split(":")[1], 16) == port and (owner := owners.get(f"socket:[{rest[5]}]")):
            count[owner] += 1
    return [count[pid] for pid in pids]


def measure(api_workers: int, streams: int, steps_per_s: float, args: argparse.Namespace) -> dict[str, Any]:
    prompt_tokens, output_tokens = (int(part) for part in args.lengths.split(":"))
    with server(api_workers, streams, steps_per_s) as (_, port, pids):
        begin = time.monotonic() + WARM_UP_S
        end = begin + args.seconds
        task = {"port": port, "streams": streams, "begin": begin, "end": end, "lengths": args.lengths}
        clients = [
            subprocess.Popen(
                [sys.executable, __file__, "client", json.dumps({**task, "streams": share})],
                stdout=subprocess.PIPE,
                text=True,
            )
            for share in even_shares(streams, args.clients)
        ]
        time.sleep(max(0.0, begin - time.monotonic()))
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(max(0.0, (begin + end) / 2 - time.monotonic()))
        shares = connections(pids, port)
        time.sleep(max(0.0, end - time.monotonic()))
        used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
        outputs = [client.communicate()[0] for client in clients]
        if any(client.returncode for client in clients):
            raise SystemExit("a client failed")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            replaced = num_replaced(page.read().decode())
    results = [json.loads(output) for output in outputs]
    total = {key: sum(result[key] for result in results) for key in ("events", "tokens", "requests", "lost")}
    late, ttft, gap = (
        list(itertools.chain(*(result[key] for result in results))) for key in ("late_ms", "ttft_ms", "gap_ms")
    )
    return {
        "api_workers": api_workers,
        "streams": streams,
        "steps_per_s": steps_per_s,
        "lengths": [prompt_tokens, output_tokens],
        "tokens_per_s": total["tokens"] / args.seconds,
        "requests_per_s": total["requests"] / args.seconds,
        "tokens_per_event": total["tokens"] / max(1, total["events"]),
        "api_cores": sum(used) / args.seconds,
        "client_cores": max(result["cpu_share"] for result in results),
        "us_per_event": 1e6 * sum(used) / max(1, total["events"]),
        "us_per_token": 1e6 * sum(used) / max(1, total["tokens"]),
        "late_ms": percentiles(late),
        "ttft_ms": percentiles(ttft),
        "gap_ms": percentiles(gap),
        "connections": shares,
        "lost": total["lost"],
        "replaced": replaced,
    }


def num_replaced(metrics: str) -> int:
    """Processes that the server has lost and replaced, by its page of metrics."""
    return sum(int(float(line.rpartition(" ")[2])) for line in metrics.splitlines() if line.startswith(RESTARTS))


def even_shares(total: int, parts: int) -> list[int]:
    return [(total + parts - 1 - index) // parts for index in range(min(total, parts))]


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) if values else float("nan") for p in (50, 99)}


def client_main(task: dict[str, Any]) -> None:
    allow_many_connections()
    prompt_tokens, output_tokens = (int(part) for part in task["lengths"].split(":"))
    client = Client(
        ("127.0.0.1", task["port"]),
        [
            completion_request(prompt_tokens, int(length))
            for length in np.random.default_rng(task["streams"]).integers(1, 2 * output_tokens + 1, DIFFERENT_LENGTHS)
        ],
        task["streams"],
        task["begin"],
        task["end"],
    )
    started, cpu = time.monotonic(), time.process_time()
    try:
        client.run()
    except ConnectionError as error:
        raise SystemExit(f"the server takes no connection: {error}") from None
    share = (time.process_time() - cpu) / (time.monotonic() - started)
    names = ("events", "tokens", "requests", "lost", "late_ms", "ttft_ms", "gap_ms")
    print(json.dumps({name: getattr(client, name) for name in names} | {"cpu_share": share}))


def print_header() -> None:
    print(
        f"{'workers':>7} {'streams':>7} {'steps/s':>7} {'tok/s':>8} {'tok/event':>9} {'req/s':>6} {'cpu':>5} "
        f"{'client':>6} {'us/event':>8} {'us/tok':>6} {'late p50':>8} {'p99 ms':>7} {'TTFT p50':>8} {'p99 ms':>7} "
        f"{'gap p50':>7} {'p99 ms':>7} {'share':>7} {'lost':>5}"
    )


def print_row(row: dict[str, Any]) -> None:
    late, ttft, gap = row["late_ms"], row["ttft_ms"], row["gap_ms"]
    print(
        f"{row['api_workers']:>7} {row['streams']:>7} {row['steps_per_s']:>7g} {row['tokens_per_s']:>8,.0f} "
        f"{row['tokens_per_event']:>9.2f} {row['requests_per_s']:>6.0f} {row['api_cores']:>5.2f} "
        f"{row['client_cores']:>6.2f} {row['us_per_event']:>8.1f} {row['us_per_token']:>6.1f} "
        f"{late['p50']:>8.2f} {late['p99']:>7.2f} {ttft['p50']:>8.2f} {ttft['p99']:>7.2f} "
        f"{gap['p50']:>7.2f} {gap['p99']:>7.2f} {'{}-{}'.format(min(row['connections']), max(row['connections'])):>7} "
        f"{row['lost']:>5}",
        flush=True,
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=numbers, default=[64, 256, 512])
    parser.add_argument("--steps-per-s", type=numbers, default=[50, 100, 300])
    parser.add_argument("--api-workers", type=numbers, default=[1])
    parser.add_argument("--lengths", default="110:276", metavar="PROMPT:OUTPUT", help="tokens (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured per line (default: %(default)g)")
    parser.add_argument("--clients", type=int, default=1, help="client processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return asyncengine(modules={"gpu_runner": "replay_runner"})
    if sys.argv[1:2] == ["client"]:
        client_main(json.loads(sys.argv[2]))
        return 0
    args = parse_args()
    rows = []
    print_header()
    for api_workers, streams, steps_per_s in itertools.product(args.api_workers, args.streams, args.steps_per_s):
        rows.append(measure(api_workers, streams, steps_per_s, args))
        print_row(rows[-1])
        if rows[-1]["replaced"]:
            print(f"{rows[-1]['replaced']} processes of the server were lost meanwhile", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["lost"] or row["replaced"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
