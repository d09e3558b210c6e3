"""`asyncengine bench`: what it sends, what it makes of the answers, and the command as a whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulation.terms import with_terms
from simulation.traces import load_trace
from support.python_path import PYTHON_PATH

from asyncengine.bench.exchange import Exchange, judge
from asyncengine.bench.load import load, split
from asyncengine.bench.load_worker import LoadWorker
from asyncengine.bench.records import Job, Record, Task
from asyncengine.bench.report import print_summary, summarize
from asyncengine.bench.workload import Load, make_jobs, prompt_ids, read_trace
from asyncengine.cli import build_parser, main
from asyncengine.config import PAGE_SIZE, ServiceClass

# ----------------------------------------------------------------------------------------------------- what is sent


def test_a_closed_loop_repeats_the_lengths_and_an_open_one_has_random_times() -> None:
    assert make_jobs(2, lengths="5:7", rate=None, seed=0) == [Job(0, 0.0, 5, 7), Job(1, 0.0, 5, 7)]
    jobs = make_jobs(2001, lengths="sharegpt", rate=10.0, seed=1)
    assert jobs == make_jobs(2001, lengths="sharegpt", rate=10.0, seed=1)
    assert (jobs[0].prompt_tokens, jobs[0].output_tokens) == (jobs[2000].prompt_tokens, jobs[2000].output_tokens)
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
    assert jobs[-1].at_s == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "seconds,prompt,output\n12.5,30,4\n10.5,20,3\n"),
        ("t.jsonl", "[12.5, 30, 4]\n[10.5, 20, 3]\n"),
        (
            "t.jsonl",
            '{"timestamp": 10500, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'
            '{"timestamp": 12500, "input_length": 30, "output_length": 4}\n',
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:10.5000000,20,3\n2023-11-16 18:17:12.5000000,30,4\n",
        ),
    ],
)
def test_a_trace_is_read_in_order_from_its_first_arrival_on(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_trace(path) == [Job(0, 0.0, 20, 3), Job(1, 2.0, 30, 4)]
    assert read_trace(path, speed=4.0)[1].at_s == 0.5
    assert len(read_trace(path, limit=1)) == 1


def test_a_load_names_a_class_for_all_requests_or_draws_a_share_of_background_from_its_seed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("[0, 30, 4]\n" * 400)
    assert {job.service_class for job in Load(requests=3).jobs()} == {None}
    assert {job.service_class for job in Load(requests=3, service_class="background").jobs()} == {"background"}
    load = Load(trace=str(path), background=0.25, seed=7)
    classes = [job.service_class for job in load.jobs()]
    assert classes == [job.service_class for job in load.jobs()]
    assert classes.count("background") == pytest.approx(100, abs=25)
    assert classes.count("interactive") == 400 - classes.count("background")
    # as the simulator draws them
    simulated = with_terms(load_trace(str(path)), background=0.25, seed=7)
    assert classes == [request.terms.service_class for request in simulated]
    assert msgspec.convert(msgspec.to_builtins(load), Load) == load


def test_lengths_of_conversations_are_drawn_from_the_seed() -> None:
    jobs = make_jobs(4000, lengths="conversation", rate=5.0, seed=3)
    assert jobs == make_jobs(4000, lengths="conversation", rate=5.0, seed=3)
    assert jobs[:1] != make_jobs(1, lengths="conversation", rate=5.0, seed=4)
    for values, mean, most in (
        ([j.prompt_tokens for j in jobs], 1155, 7000),
        ([j.output_tokens for j in jobs], 211, 1000),
    ):
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.1)
        assert min(values) >= 1
        assert max(values) <= most


def test_prompts_of_two_seeds_share_no_page_and_those_of_one_are_the_same() -> None:
    jobs = make_jobs(200, lengths="conversation", rate=None, seed=1)
    vocab = (256, 151_936)

    def pages(seed: int) -> set[tuple[int, ...]]:
        prompts = [prompt_ids(job, seed, vocab) for job in jobs]
        assert [len(prompt) for prompt in prompts] == [job.prompt_tokens for job in jobs]
        return {tuple(prompt[at : at + PAGE_SIZE]) for prompt in prompts for at in range(0, len(prompt), PAGE_SIZE)}

    whole = pages(1)
    assert whole == pages(1)
    assert len(whole) > 10_000
    assert not {page for page in whole & pages(2) if len(page) == PAGE_SIZE}


def test_processes_share_the_jobs_and_the_concurrency() -> None:
    jobs = [Job(index, 0.0, 1, 1) for index in range(7)]
    shares = split(jobs, 5, 3)
    assert [[job.index for job in share] for share, _ in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [lanes for _, lanes in shares] == [2, 2, 1]
    assert [lanes for _, lanes in split(jobs, None, 2)] == [None, None]


@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", "127.0.0.1:8000"), ("::1", "[::1]:8000")])
def test_a_request_names_the_server_as_the_url_does(host: str, named: str) -> None:
    shape: dict[str, Any] = {"concurrency": 1, "vocab": (5, 6), "seed": 0, "timeout_s": 1.0}
    task = Task(host=host, port=8000, path="/v1", headers={}, model="m", jobs=[Job(0, 0.0, 2, 1)], **shape)
    assert f"\r\nHost: {named}\r\n".encode() in LoadWorker(task)._requests[0]


# ------------------------------------------------------------------------------------------------ what comes back


def sse(*events: dict[str, Any] | str) -> bytes:
    return b"".join(
        b"data: " + (event.encode() if isinstance(event, str) else msgspec.json.encode(event)) + b"\n\n"
        for event in events
    )


def text_event(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}], "usage": None}


USAGE_EVENT = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def in_chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


async def test_an_answer_is_understood_wherever_the_network_cuts_it() -> None:
    events = sse(text_event("a\n"), text_event("b"), USAGE_EVENT, "[DONE]")
    # a chunk may end within an event too
    answer = HEAD + in_chunks(events[:20], events[20:])
    for cut in range(1, len(answer)):
        exchange = Exchange()
        exchange.data_received(answer[:cut])
        exchange.data_received(answer[cut:])
        assert exchange.done.done()
        failure, _, chunk = judge(exchange)
        assert (failure, chunk.usage) == ("", msgspec.convert(USAGE_EVENT["usage"], type(chunk.usage)))
        assert 1 <= len(exchange.arrivals) <= 2


@pytest.mark.parametrize(
    ("answer", "failure", "detail"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", "HTTP 503", "busy"),
        (b"", "no answer", ""),
        (HEAD + in_chunks(sse(text_event("a"))), "ended early", sse(text_event("a")).decode().strip()),
        (
            HEAD + in_chunks(sse(text_event("a"), {"error": {"message": "x"}})),
            "error within the stream",
            'data: {"error":{"message":"x"}}',
        ),
        (HEAD + in_chunks(sse(text_event("a"), "[DONE]")), "no usage", sse(text_event("a")).decode().strip()),
        (HEAD + in_chunks(b"<html>"), "no event that can be read", "<html>"),
    ],
)
async def test_what_went_wrong_is_told(answer: bytes, failure: str, detail: str) -> None:
    exchange = Exchange()
    exchange.data_received(answer)
    exchange.connection_lost(None)
    assert judge(exchange)[:2] == (failure, detail)


def record(sent: float, arrivals: Sequence[float], tokens: int, status: str = "ok", due: float | None = None) -> Record:
    return Record(
        status=status,
        detail="",
        due_s=due,
        sent_s=sent,
        end_s=arrivals[-1] if arrivals else sent,
        first_s=arrivals[0] if arrivals else None,
        last_s=arrivals[-1] if arrivals else None,
        prompt_tokens=10,
        output_tokens=tokens,
        gaps_us=[round(1e6 * (b - a)) for a, b in itertools.pairwise(arrivals)],
    )


def test_tpot_counts_tokens_and_not_events_and_goodput_needs_both_limits() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.5], 9, due=0.0),  # TTFT 100, TPOT 50: eight tokens after the first in two arrivals
        record(1.0, [1.3, 2.0], 8, due=0.9),  # TTFT 300, TPOT 100
        record(1.5, [1.6], 1, due=1.5),  # TTFT 100, no TPOT
        record(0.5, [], 0, status="HTTP 503", due=0.5),
    ]
    summary = summarize(records, (200.0, 60.0))
    assert (summary["requests"], summary["ok"], summary["failures"]) == (4, 3, {"HTTP 503": 1})
    assert (summary["seconds"], summary["output_tokens_per_s"], summary["requests_per_s"]) == (2.0, 9.0, 1.5)
    assert summary["tpot_ms"]["mean"] == pytest.approx(75)
    assert summary["ttft_ms"]["p50"] == pytest.approx(100)
    assert summary["itl_ms"]["max"] == pytest.approx(700)
    assert summary["late_ms"]["max"] == pytest.approx(100)
    assert summary["goodput"]["met"] == 2


def test_each_class_has_numbers_of_its_own_and_the_engines_targets(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = record(0.0, [0.5, 0.54], 2), record(0.0, [1.5, 1.6], 2)
    by_class: list[tuple[ServiceClass, Record]] = [
        *(("interactive", each) for each in (fast, slow, record(0.0, [], 0, status="HTTP 503"))),
        ("background", slow),
    ]
    summary = summarize([msgspec.structs.replace(each, service_class=name) for name, each in by_class])
    assert list(summary["classes"]) == ["interactive", "background"]
    interactive, background = summary["classes"].values()
    assert (interactive["requests"], interactive["ok"], interactive["output_tokens"]) == (3, 2, 4)
    assert interactive["within"] == {"ttft_ms": 1000.0, "tpot_ms": 50.0, "met": 1, "per_s": 1 / 1.6}
    assert background["within"] == {"ttft_ms": 60000.0, "tpot_ms": 500.0, "met": 1, "per_s": 1 / 1.6}
    assert background["itl_ms"]["p99"] == pytest.approx(100)
    assert background["output_tokens_per_s"] == pytest.approx(2 / 1.6)
    print_summary(summary)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["background", "1", "1500.00", "1500.00", *4 * ["100.00"], "100.0", "1"]
    assert "classes" not in summarize([fast])


@pytest.mark.parametrize("way", [("--concurrency", "3"), ("--rate", "400", "--service-class", "background")])
async def test_a_server_is_loaded_by_several_processes(
    way: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer has two tokens an event; every request whose output is 3 tokens long is refused."""
    prompts: list[list[int]] = []
    at_once, most_at_once = 0, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        assert head.startswith("POST /base/v1/completions ")
        assert body["ignore_eos"]
        assert body.get("service_class") == ("background" if way[0] == "--rate" else None)
        prompts.append(body["prompt"])
        if body["max_tokens"] == 3:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")
        else:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            usage |= {"prompt_tokens_details": {"cached_tokens": 5}}
            events = [sse(text_event("ab")) for _ in range(body["max_tokens"] // 2)]
            writer.write(HEAD + in_chunks(*events, sse({"choices": [], "usage": usage}, "[DONE]")))
        await writer.drain()
        at_once -= 1
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    args = build_parser().parse_args(
        ["bench", "--url", f"http://127.0.0.1:{port}/base/", "--model", "m", "--processes", "2", "--quiet", *way]
    )
    args.vocab = (100, 103)
    name = args.service_class
    jobs = [Job(index, index / 400, 10 + index, 3 if index == 4 else 8, name) for index in range(10)]
    async with server:
        records, cpu_share = await load(args, jobs, None if args.rate else args.concurrency)
    summary = summarize(records)
    assert (summary["ok"], summary["failures"], summary["output_tokens"]) == (9, {"HTTP 503": 1}, 72)
    assert sorted(map(len, prompts)) == [10 + index for index in range(10)]
    assert {token for prompt in prompts for token in prompt} == {100, 101, 102}
    assert ("late_ms" in summary) == (way[0] == "--rate")
    assert way[0] == "--rate" or most_at_once <= 3
    assert cpu_share > 0
    print_summary(summary)
    output = capsys.readouterr().out
    assert "9 of 10 requests ok" in output
    assert "the server had 34 % of the prompt tokens from before" in output
    assert "failed:      1 x HTTP 503, such as: {}" in output


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--url", "https://a"], 2, "argument --url: invalid http_url value: 'https://a'"),
        (["--concurrency", "0"], 2, "argument --concurrency: invalid positive value: '0'"),
        (["--lengths", "5"], 2, "argument --lengths: invalid lengths value: '5'"),
        (["--vocab", "9:9"], 2, "argument --vocab: invalid vocabulary value: '9:9'"),
        (["--background", "1.1"], 2, "argument --background: invalid share value: '1.1'"),
        (["--seed", "-1"], 2, "argument --seed: invalid natural value: '-1'"),
        (["--rate", "1", "--trace", "t"], 2, "argument --trace: not allowed with argument --rate"),
        (["--trace", "/nowhere.csv"], 1, "asyncengine: /nowhere.csv cannot be read as a trace: No such file"),
        (
            ["--json", "/nowhere/numbers.json"],
            1,
            "asyncengine: cannot write /nowhere/numbers.json: No such file or dir",
        ),
        (
            ["--api-key-file", "/nowhere"],
            1,
            "asyncengine: cannot read the API key in /nowhere: No such file or directory",
        ),
        (["--url", "http://127.0.0.1:9"], 1, "asyncengine: http://127.0.0.1:9 does not tell its models: "),
    ],
)
def test_a_load_that_cannot_be_is_told_in_one_line(
    args: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        sys.exit(main(["bench", *args]))
    assert exit.value.code == code
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b'{"data": []}', b"[1]", b"\xff"])
def test_a_server_that_does_not_tell_its_models_is_told_in_one_line(
    answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: it would go to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["bench", "--url", url]) == 1
        server.shutdown()
    assert capsys.readouterr().err == f"asyncengine: {url} does not tell its models: its answer is not a list of them\n"


def test_the_script_is_the_command_and_writes_the_numbers(tmp_path: Path) -> None:
    """Against a server that gives two tokens and its usage."""
    script = Path(__file__).parents[2] / "scripts" / "bench_serving.py"
    numbers = tmp_path / "out.json"
    answer = sse(text_event("a"), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}, "[DONE]")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send("application/json", b'{"data": [{"id": "the-model"}]}')

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send("text/event-stream", answer)

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: it would go to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/"
        args = ["--url", url, "--requests", "3", "--lengths", "5:2", "--processes", "1", "--json", str(numbers)]
        result = subprocess.run(
            [sys.executable, script, *args],
            env=os.environ | {"PYTHONPATH": PYTHON_PATH},
            capture_output=True,
            text=True,
        )
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "3 of 3 requests ok" in result.stdout
    assert "3/3" in result.stderr, "the progress bar"
    written = json.loads(numbers.read_text())
    assert (written["model"], written["ok"], written["output_tokens"]) == ("the-model", 3, 6)
    assert msgspec.convert(written["load"], Load) == Load(requests=3, lengths="5:2", concurrency=1)
