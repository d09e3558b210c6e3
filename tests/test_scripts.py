"""The scripts for a running server and for a GPU, as far as they run without either."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_summary
import msgspec
import profile_gaps
import pytest
from bench_step import Engine
from gpu_gaps import Gap, Interval, analyse, merged, overlaps, step_gaps
from make_toy_tokenizer import toy_tokenizer
from support.python_path import PYTHON_PATH
from torch.autograd import DeviceType

from asyncengine.bench.exchange import Exchange, judge
from asyncengine.bench.load import load, split
from asyncengine.bench.records import Job, Record
from asyncengine.bench.report import print_summary, summarize
from asyncengine.bench.workload import make_jobs, read_trace
from asyncengine.cli import build_parser, main
from asyncengine.config import EngineConfig
from detokenizer_proc.vocabulary import Vocabulary

GPU_CHECK = Path(__file__).parents[1] / "scripts" / "gpu_check.sh"
ENVIRON = os.environ | {"PYTHONPATH": PYTHON_PATH}

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


def test_processes_share_the_jobs_and_the_concurrency() -> None:
    jobs = [Job(index, 0.0, 1, 1) for index in range(7)]
    shares = split(jobs, 5, 3)
    assert [[job.index for job in share] for share, _ in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [lanes for _, lanes in shares] == [2, 2, 1]
    assert [lanes for _, lanes in split(jobs, None, 2)] == [None, None]


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


@pytest.mark.parametrize("way", [("--concurrency", "3"), ("--rate", "400")])
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
        prompts.append(body["prompt"])
        if body["max_tokens"] == 3:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")
        else:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
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
    jobs = [Job(index, index / 400, 10 + index, 3 if index == 4 else 8) for index in range(10)]
    async with server:
        records, cpu_share = await load(args, jobs)
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
    assert "failed:      1 x HTTP 503, such as: {}" in output


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--url", "https://a"], 2, "argument --url: invalid http_url value: 'https://a'"),
        (["--concurrency", "0"], 2, "argument --concurrency: invalid positive value: '0'"),
        (["--lengths", "5"], 2, "argument --lengths: invalid lengths value: '5'"),
        (["--vocab", "9:9"], 2, "argument --vocab: invalid vocabulary value: '9:9'"),
        (["--rate", "1", "--trace", "t"], 2, "argument --trace: not allowed with argument --rate"),
        (["--trace", "/nowhere.csv"], 1, "asyncengine: /nowhere.csv cannot be read as a trace: FileNotFoundError"),
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


def test_the_script_is_the_command_and_writes_the_numbers(tmp_path: Path) -> None:
    """Against a server that gives two tokens and its usage."""
    script = GPU_CHECK.with_name("bench_serving.py")
    numbers = tmp_path / "out.json"
    answer = sse(text_event("a"), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}, "[DONE]")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send("application/json", b'{"data": [{"id": "the-model"}]}')

        def do_POST(self) -> None:
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
        url = f"http://127.0.0.1:{server.server_port}"
        args = ["--url", url, "--requests", "3", "--lengths", "5:2", "--processes", "1", "--json", str(numbers)]
        result = subprocess.run([sys.executable, script, *args], env=ENVIRON, capture_output=True, text=True)
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "3 of 3 requests ok" in result.stdout
    assert "3/3" in result.stderr, "the progress bar"
    written = json.loads(numbers.read_text())
    assert (written["model"], written["ok"], written["output_tokens"]) == ("the-model", 3, 6)


# -------------------------------------------------------------------------------------------------------- idle gaps


def test_overlapping_and_touching_intervals_merge() -> None:
    intervals = [Interval(5, 6), Interval(0, 2), Interval(1, 1.5), Interval(2, 3), Interval(8, 9)]
    assert merged(intervals) == [Interval(0, 3), Interval(5, 6), Interval(8, 9)]


def test_a_gap_lies_between_the_last_kernel_of_a_step_and_the_first_of_the_next() -> None:
    kernels = [Interval(1, 4), Interval(3, 9), Interval(5, 6), Interval(12, 20), Interval(19, 23), Interval(22, 30)]
    # a step's upload may begin while the step before still computes; kernels of two steps may overlap
    assert step_gaps(kernels, [0, 8, 21]) == [Gap(0, 9, 12), Gap(1, 22, 22)]
    assert step_gaps(kernels, [0, 8, 40, 50]) == [Gap(0, 9, 12)], "a step without kernels has no gap"


def test_the_host_is_found_in_a_gap() -> None:
    phases = [Interval(0, 4, "plan"), Interval(4, 11, "launch"), Interval(14, 15, "wait"), Interval(16, 17, "wait")]
    assert overlaps(Gap(0, 3, 20), phases) == {"plan": 1, "launch": 7, "wait": 2, "other": 7}
    assert overlaps(Gap(0, 5, 6), phases) == {"launch": 1}


def test_a_report_of_made_up_steps_is_exact() -> None:
    begins = [0.0, 100.0, 200.0, 300.0]
    kernels = [Interval(begin + 10, begin + 50, "a") for begin in begins]
    kernels += [Interval(begin + 50, begin + 90, "b") for begin in begins]
    kernels += [Interval(140, 150, "a")]  # runs beside another
    report = analyse(kernels, begins, [Interval(85, 105, "launch")])
    assert (report.steps, report.step_us, report.busy_us, report.busy_share) == (3, 100, 80, 0.8)
    assert report.kernels_per_step == pytest.approx(7 / 3)
    assert report.idle == {"p50": 20, "p99": 20, "max": 20}
    assert report.kernels == [("a", pytest.approx(130 / 3), pytest.approx(4 / 3)), ("b", 40, 1)]
    assert report.longest[0] == (Gap(0, 90, 110), {"launch": 15, "other": 5})


# ------------------------------------------------------------------------- the profiled loop, with a made-up profiler


class MadeUpProfiler:
    """Steps of 100 us: the upload, then two kernels, then the download; before them, the host's wait for the GPU."""

    STEPS = 20

    def __init__(self, activities: Sequence[object]) -> None:
        pass

    def __enter__(self) -> MadeUpProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def events(self) -> Iterator[SimpleNamespace]:
        yield made_up_event(DeviceType.CPU, "cudaDeviceSynchronize", 0, 10)
        yield made_up_event(DeviceType.CPU, "cudaGraphLaunch", 50, 60)
        for step in range(self.STEPS):
            begin = 100 * (step + 1)
            yield made_up_event(DeviceType.CUDA, "Memcpy HtoD (Pinned -> Device)", begin, begin + 2)
            yield made_up_event(DeviceType.CUDA, "forward", begin + 4, begin + 60)
            yield made_up_event(DeviceType.CUDA, "sample", begin + 60, begin + 94)
            yield made_up_event(DeviceType.CUDA, "Memcpy DtoH (Device -> Pinned)", begin + 94, begin + 96)
        yield made_up_event(DeviceType.CPU, "cudaDeviceSynchronize", 9000, 9001)


def made_up_event(device: DeviceType, name: str, begin: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(device_type=device, name=name, time_range=span, is_user_annotation=False)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    shapes: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    return tmp_path


def test_the_loop_is_profiled_and_goes_on_unmarked(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_gaps, "profile", MadeUpProfiler)
    monkeypatch.setattr(profile_gaps.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profile_gaps.torch.cuda, "get_device_name", lambda: "a made-up GPU")
    engine = Engine(tiny_model, EngineConfig(device="cpu", load_format="dummy", max_num_seqs=4, kv_cache_tokens=4096))
    monkeypatch.setattr(profile_gaps, "Engine", lambda model, config: engine)
    results = profile_gaps.profile_model(tiny_model, [1, 3], Namespace(context=8, steps=10))
    for result, batch in zip(results, (1, 3), strict=True):
        assert (result["batch"], result["step_us"], result["busy_us"], result["busy_share"]) == (batch, 100, 90, 0.9)
        assert (result["kernels_per_step"], result["idle_us"]) == (2, {"p50": 10, "p99": 10, "max": 10})
        assert result["kernels"] == [("forward", 56, 1), ("sample", 34, 1)]
        assert sum(result["longest_gaps_us"][0]["host"].values()) == pytest.approx(10)
    assert not {"launch", "collect"} & set(vars(engine.executor))
    output = capsys.readouterr().out
    assert "batch 3: GPU busy 90.0 % under the profiler (90.0 of 100.0 us a step)" in output
    assert "gap of 10.0 us" in output


def test_without_a_gpu_the_profiler_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_gaps.py"])
    monkeypatch.setattr(profile_gaps.torch.cuda, "is_available", lambda: False)
    assert profile_gaps.main() == 1
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------------------------ the check of a GPU


def test_without_a_gpu_the_check_says_so_and_a_wrong_part_is_named() -> None:
    def run(*args: str, **environ: str) -> tuple[int, str]:
        result = subprocess.run([GPU_CHECK, *args], env=os.environ | environ, capture_output=True, text=True)
        return result.returncode, result.stderr

    assert run(PYTHON="false") == (1, "gpu_check.sh needs an NVIDIA GPU, and torch sees none\n")
    code, message = run("nothing", DEVICE="cpu", PYTHON="false")
    assert code == 2
    assert "has no part nothing" in message


@pytest.mark.parametrize("size", [256, 3000])
def test_a_toy_tokenizer_has_a_text_for_every_id(size: int) -> None:
    vocabulary = Vocabulary(toy_tokenizer(size))
    assert vocabulary.uses_table
    assert vocabulary.size == size
    stream = vocabulary.open(skip_special_tokens=True, prompt_tail=(), prompt_tokens=0)
    texts = [stream.push(token) for token in range(256, size)]
    assert len(set(texts)) == size - 256
    assert all(text.startswith(" ") and 4 <= len(text) <= 5 for text in texts)


def test_the_checks_summary_has_its_parts_and_headline_numbers(tmp_path: Path) -> None:
    assert gpu_summary.summary(tmp_path) == ""
    (tmp_path / "parts.tsv").write_text("tests-gpu\tpassed\t61\nsanitize\tskipped\t0\n")
    decode = {"batch": 8, "ms": 0.8, "floor_ms": 0.32, "tokens_per_s": 10000.0, "host_us": 99.6}
    prefill = {"count": 16, "length": 2048, "tokens_per_s": 612345.0, "first_ms": 7.5}
    steps = [{"model": "m", "decode": [decode], "prefill": [prefill]}]
    (tmp_path / "step-m.json").write_text(json.dumps(steps))
    gap = {"busy_us": 99.0, "plain_step_us": 100.0, "busy_share": 0.951, "idle_us": {"p50": 3.0}}
    (tmp_path / "gaps-m.json").write_text(json.dumps([{"model": "m", "batch": 8, "kernels_per_step": 201.0, **gap}]))
    run = {"ok": 4, "requests": 4, "output_tokens_per_s": 1650.0, "ttft_ms": {"p50": 5.25}, "tpot_ms": {"p50": 0.6}}
    for streams in (256, 1):
        (tmp_path / f"serve-m-0.6b-{streams}.json").write_text(json.dumps(run))
    lines = gpu_summary.summary(tmp_path).splitlines()
    rows = [line for line in lines if line and " --- " not in line]
    assert rows == [
        "| part |  | seconds |",
        "| tests-gpu | passed | 61 |",
        "| sanitize | skipped | 0 |",
        "| decode | batch | ms/step | floor | x floor | tok/s | host us |",
        "| m | 8 | 0.800 | 0.320 | 2.50 | 10,000 | 100 |",
        "| prefill | prompts | tok/s | first token ms |",
        "| m | 16 x 2048 | 612,345 | 7.50 |",
        "| busy | batch | of a step | under the profiler | idle gap p50 us | kernels a step |",
        "| m | 8 | 99.0 % | 95.1 % | 3.0 | 201 |",
        "| HTTP | streams | ok | out tok/s | TTFT p50 ms | TPOT p50 ms |",
        "| m-0.6b | 1 | 4 of 4 | 1,650 | 5.25 | 0.60 |",
        "| m-0.6b | 256 | 4 of 4 | 1,650 | 5.25 | 0.60 |",
    ]


def test_the_sanitizers_steps_run_and_its_absence_is_told(tmp_path: Path) -> None:
    script = GPU_CHECK.with_name("sanitize.sh")

    def run(*args: str, **environ: str) -> tuple[int, str]:
        environment = os.environ | {"PYTHON": sys.executable} | environ
        result = subprocess.run([script, *args], env=environment, capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    code, output = run(DEVICE="cpu")
    assert code == 0
    assert "all requests ended" in output
    assert run("nothing")[0] == 2
    # a stand-in for the sanitizer, which finds no error in a stand-in for the steps, or some
    stand_in = tmp_path / "compute-sanitizer"
    for status, word in ((0, "clean"), (1, "FAILED with 1")):
        stand_in.write_text(f"#!/bin/sh\nexit {status}\n")
        stand_in.chmod(0o755)
        code, output = run("memcheck", "racecheck", SANITIZER=str(stand_in), PYTHON="true")
        assert code == status
        ends = [line.split(word)[0] for line in output.splitlines() if word in line]
        assert ends == ["==> memcheck: ", "==> racecheck: "]
