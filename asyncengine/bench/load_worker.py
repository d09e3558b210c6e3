"""One client process of `asyncengine bench`: sends its share of the requests and reports each as it ends.

Not started by hand. It reads a `Task` line from stdin, prepares every request, says it is ready with a `Ready` line,
reads the start (seconds of `time.monotonic`, which all processes of a machine share) and then writes a `Record` line
for each request and a `Done` line at the end. All lines are JSON. Requests go over raw asyncio sockets, a connection
each, so that the client is not what limits.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time

import msgspec
import uvloop

from asyncengine.bench.exchange import Exchange, Usage, judge
from asyncengine.bench.records import Done, Job, Line, Ready, Record, Task
from asyncengine.bench.workload import prompt_ids


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
        write(self._record(job, exchange, failure, due, sent))

    def _record(self, job: Job, exchange: Exchange | None, failure: str, due: float | None, sent: float) -> Record:
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
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            gaps_us=[round(1e6 * (b - a)) for a, b in itertools.pairwise(arrivals)],
            service_class=job.service_class,
        )

    def _request(self, job: Job) -> bytes:
        task = self._task
        body = msgspec.json.encode(
            {
                "model": task.model,
                "prompt": prompt_ids(job, task.seed, task.vocab),
                "max_tokens": job.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"service_class": job.service_class} if job.service_class else {}),
            }
        )
        host = f"[{task.host}]" if ":" in task.host else task.host
        headers = {
            "Host": f"{host}:{task.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **task.headers,
        }
        lines = [f"POST {task.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


def write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


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
