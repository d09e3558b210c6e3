"""One client process of bench_serving.py: sends its share of the requests and reports each as it ends.

Not started by hand. It reads a `Task` line from stdin, prepares every request, says it is ready with a `Ready` line,
reads the start (seconds of `time.monotonic`, which all processes of a machine share) and then writes a `Record` line
for each request and a `Done` line at the end. All lines are JSON. Requests go over raw asyncio sockets, a connection
each, and of an answer only what is measured is looked at, so that the client is not what limits.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import uvloop

DETAIL_BYTES = 300


class Job(msgspec.Struct, frozen=True, array_like=True):
    """at_s: when it is due, in seconds after the start; of no meaning in a closed loop."""

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """concurrency: requests under way at any time (closed loop), or None to send each when due (open loop).

    vocab: prompts are random ids from the first to below the second.
    """

    host: str
    port: int
    path: str
    headers: dict[str, str]
    model: str
    jobs: list[Job]
    concurrency: int | None
    vocab: tuple[int, int]
    seed: int
    timeout_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Every request is prepared."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How one request went; times in seconds after the start.

    status: "ok", else what went wrong. detail: the beginning of what the server said about that.
    first_s, last_s: arrival of the first and last event with output, None where there was none.
    gaps_us: times between the arrivals of output; several events that arrive at once are one arrival.
    prompt_tokens, output_tokens: as the server counts them.
    """

    status: str
    detail: str
    due_s: float | None
    sent_s: float
    end_s: float
    first_s: float | None
    last_s: float | None
    prompt_tokens: int
    output_tokens: int
    gaps_us: list[int]


class Done(msgspec.Struct, frozen=True, tag=True):
    """cpu_share: processor time of this process from start to end over the time between."""

    cpu_share: float


Line = Ready | Record | Done


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    """What is read of the last event of an answer."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Exchange(asyncio.Protocol):
    """One streamed answer. `done` is set when the answer is complete or the connection is gone."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.status = 0
        self.arrivals: list[float] = []
        self.last_event = b""
        self.events_in_last_arrival = 0
        self.complete = False
        self.text = b""  # not yet an event; the body of an answer that is no stream
        self._head = b""
        self._chunked = False
        self._chunks = bytearray()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head.split(b" ", 2)[1])
            self._chunked = b"transfer-encoding: chunked" in head.lower()
        self._read_events(b"".join(self._unchunk(data)) if self._chunked else data, now)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _unchunk(self, data: bytes) -> Iterator[bytes]:
        """The content of the HTTP chunks that are complete."""
        self._chunks += data
        begin = 0
        while (line_end := self._chunks.find(b"\r\n", begin)) >= 0:
            end = line_end + 2 + int(self._chunks[begin:line_end].partition(b";")[0], 16)
            if len(self._chunks) < end + 2:
                break
            yield bytes(self._chunks[line_end + 2 : end])
            begin = end + 2
        del self._chunks[:begin]

    def _read_events(self, text: bytes, now: float) -> None:
        text = self.text + text
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self.text = text.split(b"\n\n")
        count = 0
        for event in events:
            if event == b"data: [DONE]":
                self.complete = True
            elif event.startswith(b"data:"):
                self.last_event = event
                count += 1
        if count:
            self.arrivals.append(now)
            self.events_in_last_arrival = count
        if self.complete:
            self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class LoadWorker:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._requests = {job.index: self._request(job) for job in task.jobs}
        self._start = 0.0

    async def run(self, start: float) -> None:
        """Send every request; each is reported when it ends."""
        self._start = start
        await self._sleep_until(0.0)
        jobs = iter(self._task.jobs)
        if self._task.concurrency is not None:

            async def lane() -> None:
                for job in jobs:
                    await self._send(job, None)

            await asyncio.gather(*(lane() for _ in range(self._task.concurrency)))
            return
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await self._sleep_until(job.at_s)
                group.create_task(self._send(job, job.at_s))

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self._now()))

    async def _send(self, job: Job, due: float | None) -> None:
        sent, transport, exchange, failure = self._now(), None, None, ""
        try:
            async with asyncio.timeout(self._task.timeout_s):
                transport, exchange = await asyncio.get_running_loop().create_connection(
                    Exchange, self._task.host, self._task.port
                )
                transport.write(self._requests.pop(job.index))
                await exchange.done
        except TimeoutError:
            failure = "timeout"
        except OSError as error:
            failure = type(error).__name__
        finally:
            if transport is not None:
                transport.close()
        write(self._record(exchange, failure, due, sent))

    def _record(self, exchange: Exchange | None, failure: str, due: float | None, sent: float) -> Record:
        arrivals = [] if exchange is None else [moment - self._start for moment in exchange.arrivals]
        usage, detail = Usage(0, 0), ""
        if exchange is not None and not failure:
            failure, detail, chunk = judge(exchange)
            usage = chunk.usage or usage
            if not chunk.choices and exchange.events_in_last_arrival == 1:
                arrivals = arrivals[:-1]  # the usage alone is no output
        return Record(
            status=failure or "ok",
            detail=detail,
            due_s=due,
            sent_s=sent,
            end_s=self._now(),
            first_s=arrivals[0] if arrivals else None,
            last_s=arrivals[-1] if arrivals else None,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            gaps_us=[round(1e6 * (b - a)) for a, b in itertools.pairwise(arrivals)],
        )

    def _request(self, job: Job) -> bytes:
        task = self._task
        prompt = random.Random(f"{task.seed} {job.index}").choices(range(*task.vocab), k=job.prompt_tokens)
        body = msgspec.json.encode(
            {
                "model": task.model,
                "prompt": prompt,
                "max_tokens": job.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        headers = {
            "Host": f"{task.host}:{task.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **task.headers,
        }
        lines = [f"POST {task.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


def judge(exchange: Exchange) -> tuple[str, str, Chunk]:
    """What went wrong and the beginning of what the server said of it ("" for nothing), and the last event."""
    said = (exchange.last_event or exchange.text)[:DETAIL_BYTES].decode(errors="replace")
    if exchange.status != 200:
        return (f"HTTP {exchange.status}" if exchange.status else "no answer"), said, Chunk()
    try:
        chunk = msgspec.json.decode(exchange.last_event[5:], type=Chunk)
    except msgspec.DecodeError:
        return "no event that can be read", said, Chunk()
    if chunk.error:
        return "error within the stream", said, chunk
    if not exchange.complete:
        return "ended early", said, chunk
    return ("", "", chunk) if chunk.usage is not None else ("no usage", said, chunk)


def write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def split(jobs: Sequence[Job], concurrency: int | None, processes: int) -> list[tuple[list[Job], int | None]]:
    """Jobs and concurrency of each process: every `processes`-th job, and an even share of the requests at once."""
    return [
        (
            list(jobs[index::processes]),
            None if concurrency is None else (concurrency + processes - 1 - index) // processes,
        )
        for index in range(processes)
    ]


def main() -> None:
    worker = LoadWorker(msgspec.json.decode(sys.stdin.buffer.readline(), type=Task))
    write(Ready())
    line = sys.stdin.buffer.readline()
    if not line:  # the parent is gone
        return
    start = float(line)
    before = time.process_time()
    uvloop.run(worker.run(start))
    write(Done((time.process_time() - before) / (time.monotonic() - start)))


if __name__ == "__main__":
    main()
