"""Scripts that load or kill a running server, and what they make of it beside the simulation."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import bench_gap
import compare_with_simulation
import msgspec
import pytest
import rate_at_load
import watch_step_time
from bench_gap import Streams
from compare_with_simulation import COLUMNS, compared, described, simulated
from recovery.followed_streams import Answer
from recovery.followed_streams import Streams as FollowedStreams
from recovery.greedy_proof import Proof
from simulation.replica import ReplicaConfig
from simulation.step_model import Coefficients, StepModel
from simulation.traces import OUTPUT_IDS, from_jobs
from support.python_path import PYTHON_PATH

from asyncengine.bench.records import Job
from asyncengine.bench.workload import Load
from asyncengine.delta import Delta
from asyncengine.wire.accounting import RingWriter, StepRecord

COEFFICIENTS = Coefficients(
    base_tokens=(1, 2049),
    base_us=(1000.0, 9192.0),
    sampled_row_us=1.0,
    decode_context_us=0.0,
    prefill_pair_us=0.0,
    host_rows=(1, 256),
    host_us=(10.0, 10.0),
)
CONFIG = ReplicaConfig(kv_cache_tokens=65536, max_model_len=8192)
LOAD = Load(requests=40, rate=50.0, lengths="300:20", background=0.5, seed=3)

# ------------------------------------------------------------------------------------------- beside the simulation


def as_if_real(figures: dict[str, Any]) -> dict[str, Any]:
    """A run whose clients saw what was simulated."""
    classes = {
        name: own | {"itl_ms": own["gap_ms"], "within": {"met": round(own["good_share"] * own["requests"])}}
        for name, own in figures.get("classes", {}).items()
    }
    whole = figures | {"itl_ms": figures["gap_ms"], "classes": classes}
    return whole | {"ok": 40, "load": msgspec.to_builtins(LOAD)}


def test_a_run_that_is_as_simulated_has_no_error_and_one_twice_as_slow_has_half() -> None:
    figures = simulated(LOAD, CONFIG, StepModel(COEFFICIENTS))
    run = as_if_real(figures)
    rows = compared(run, figures)
    assert [row["class"] for row in rows] == ["all", "interactive", "background"]
    assert sum(row["requests"] for row in rows[1:]) == rows[0]["requests"] == 40
    for row in rows:
        assert [error for error in row["error"] if error is not None] == [0.0] * (7 if row["class"] == "all" else 8)
    run["ttft_ms"] = {mark: 2 * value for mark, value in run["ttft_ms"].items()}
    slower = compared(run, figures)[0]
    assert slower["error"][: COLUMNS.index("TPOT p50")] == [-50.0, -50.0]


def test_all_requests_of_one_class_are_compared_with_all_that_were_simulated() -> None:
    load = msgspec.structs.replace(LOAD, background=1.0)
    figures = simulated(load, CONFIG, StepModel(COEFFICIENTS))
    assert "classes" not in figures
    run = as_if_real(figures)
    run["classes"] = {"background": figures | {"itl_ms": figures["gap_ms"], "within": {"met": 40}}}
    everyone, background = compared(run, figures)
    assert background["simulated"] == everyone["simulated"]


def test_a_closed_loop_is_simulated_as_one() -> None:
    load = Load(requests=6, concurrency=2, lengths="10:5")
    figures = simulated(load, CONFIG, StepModel(COEFFICIENTS))
    assert (figures["ended"], described(load)) == (6, "2 at once, lengths 10:5")
    assert described(LOAD) == "50 a second, lengths 300:20, 50 % background"


def test_requests_that_a_client_sends_share_nothing() -> None:
    jobs = [Job(0, 0.0, 30, 1, "background"), Job(1, 0.5, 30, 1), Job(2, 0.5, OUTPUT_IDS // 2, 1), Job(3, 1.0, 4, 1)]
    requests = from_jobs(jobs)
    assert [request.first_id for request in requests[:3]] == [0, 30, 60]
    assert max(request.first_id + request.prompt_tokens for request in requests) <= OUTPUT_IDS
    assert (requests[0].terms.service_class, requests[1].at_ns) == ("background", 500_000_000)


def test_the_commands_print_what_they_compare_and_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run, out = tmp_path / "model.json", tmp_path / "run.json", tmp_path / "out.json"
    cache = {"tokens": 65536, "bytes_per_token": 1, "source": "none"}
    file = {"gpu": "none", "model": "tiny", "max_model_len": 8192, "kv_cache": cache}
    model.write_text(json.dumps(file | {"coefficients": msgspec.to_builtins(COEFFICIENTS)}))
    cached = as_if_real(simulated(LOAD, CONFIG, StepModel(COEFFICIENTS))) | {"cached_prompt_share": 0.25}
    run.write_text(json.dumps(cached))
    argv = ["compare", str(run), "--model", str(model), "--json", str(out), "--png", str(tmp_path / "out.png")]
    monkeypatch.setattr(sys, "argv", argv)
    compare_with_simulation.main()
    printed = capsys.readouterr().out
    assert "run: 40 of 40 ok" in printed
    assert "no comparison: the server had 25 % of its prompt tokens from before" in printed
    assert [line.split()[:2] for line in printed.splitlines() if "interactive" in line] == [["interactive", "19"]]
    assert json.loads(out.read_text())["runs"][0]["rows"][0]["error"][0] == 0
    assert (tmp_path / "out.png").stat().st_size > 1000
    monkeypatch.setattr(rate_at_load, "SAMPLE", 100)
    monkeypatch.setattr(sys, "argv", ["rate", str(model), "--load", "0.5", "--seconds", "10", "--lengths", "2048:1"])
    rate_at_load.main()
    rate, requests = capsys.readouterr().out.split()
    # a step of 2048 tokens takes 9.2 ms
    assert float(rate) == pytest.approx(0.5 / 9.19e-3, rel=0.05)
    assert int(requests) == pytest.approx(10 * float(rate), abs=1)


# --------------------------------------------------------------------------------------------- beside a long prompt


def test_the_gaps_that_count_are_those_that_a_prompt_can_have_made() -> None:
    streams = Streams.__new__(Streams)
    streams.arrivals = [[0.0, 1.0, 3.0, 3.5, 9.0, 9.1], [2.5]]
    assert streams.gaps_ms(1.5, 4.0) == [2000, 500, 5500]


def test_the_steps_beside_a_prompt_are_those_of_the_ring(tmp_path: Path) -> None:
    assert bench_gap.steps_within(None, 0, 9) == bench_gap.steps_within(tmp_path, 0, 9) == {}
    nothing = StepRecord(*[0] * len(StepRecord._fields))
    with closing(RingWriter(tmp_path, "gpu_runner", 0, StepRecord)) as ring:
        for step in range(1, 7):
            record = nothing._replace(
                step=step,
                prefill_tokens=0 if step == 3 else 100 * step,
                launch=step * 10**9,
                collected=step - 1,
                device_begin=10**6 * step,
                device_end=10**6 * (step + 2),
            )
            ring.write(list(record[1:]))
        found = bench_gap.steps_within(tmp_path, 1.5, 5.5)
    assert found == {"steps": 3, "chunk": 400.0, "device_ms": {"p50": 2.0, "max": 2.0}}


# ------------------------------------------------------------------------------------- with a server of one's own


@contextmanager
def scripted_server(tmp_path: Path, **script: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Which emits the prompt's ids; and its URL."""
    environ = {"PYTHONPATH": PYTHON_PATH, "ASYNCENGINE_SCRIPT": json.dumps(script), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "support.scripted_cli", "serve", "--port", "0", "--max-model-len", "2048"]
    with subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith("Ready: "))
            yield process, ready.split(" at ")[1].strip()
        finally:
            process.kill()


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r-") as path:
        yield Path(path)


def run_main(main: Callable[[], int | None], monkeypatch: pytest.MonkeyPatch, *args: object) -> int | None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, args)])
    return main()


def delta(ids: list[int], counted: int, text: str = "", finish_reason: str | None = None) -> Delta:
    return Delta(
        index=0,
        text=text,
        token_ids=ids,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=counted,
        finish_reason=finish_reason,
    )


@pytest.mark.parametrize(
    ("deltas", "text", "faults"),
    [
        ([delta([5, 6], 2, "ab"), delta([7], 3, "c", "length")], "abc", []),
        ([delta([5, 6], 2, "ab"), delta([7], 4, "c", "length")], "abc", ["3 ids had come, 4 were counted"]),
        ([delta([5, 6], 2, "ab", "length")], "ab", ["it ended as ['length'] with 2 ids of 3"]),
        ([delta([5, 6, 7], 3, "abc")], "abc", ["it ended as [] with 3 ids of 3"]),
        ([delta([5, 6, 7], 3, "aac", "length")], "abc", ["its ids do not read 'aac'..., which it said"]),
        (
            [delta([5, 6, 7], 3, "ab", "length"), delta([], 3, "c", "length")],
            "abc",
            ["output after its end: 'c'", "it ended as ['length', 'length'] with 3 ids of 3"],
        ),
    ],
)
def test_what_cannot_be_of_a_whole_stream_is_told(deltas: list[Delta], text: str, faults: list[str]) -> None:
    answer = Answer([1])
    for place, each in enumerate(deltas):
        answer.add(each, early=place == 0)
    answer.check_end(3, text)
    assert answer.faults == faults


def test_answers_are_proven_within_a_tolerance_and_only_if_a_dropped_token_would_have_been_found() -> None:
    assert Answer([1], [5, 6, 7], early=2).without_one() == [5, 7]
    assert Proof(gaps=[0.0, 0.1], shortened=[3.0, 0.05]).faults(0.1) == []
    assert Proof(gaps=[0.0, 0.25, float("nan")], shortened=[3.0, 3.0, 3.0]).faults(0.1) == [
        "a token of stream 1 is less likely than the best by 0.25 nat",
        "a token of stream 2 is less likely than the best by nan nat",
    ]
    assert Proof(gaps=[0.0] * 3, shortened=[3.0, 0.0, 0.1]).faults(0.1) == [
        "a dropped token is found in 1 of 3: nothing is proven"
    ]


def test_a_stream_goes_on_when_its_longest_silence_ends() -> None:
    streams = FollowedStreams.__new__(FollowedStreams)
    streams.after = [[0.1, 0.2, 7.0, 7.1], [], [5.0], [0.1, 0.2]]
    assert streams.back() == [0.1, 5.0, 7.0]


def test_gaps_beside_a_prompt_are_measured_for_each_class(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = short_path / "out.json"
    with scripted_server(short_path, step_ms=2, endless_from=500) as (_, url):
        args = ("--url", url, "--streams", "2", "--stream-prompt", "8", "--stream-tokens", "1000", "--prompt", "500")
        run_main(bench_gap.main, monkeypatch, *args, "--run-dir", short_path, "--json", out)
        assert (
            run_main(watch_step_time.main, monkeypatch, "--url", url, "--", sys.executable, "-c", "raise SystemExit(3)")
            == 3
        )
    rows = json.loads(out.read_text())
    assert [(row["class"], row["run"]) for row in rows] == [(name, run) for name in bench_gap.CLASSES for run in (1, 2)]
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4 + 1


def test_a_stream_that_ends_too_soon_is_told() -> None:
    class Client:
        async def generate(self, *args: object, **more: object) -> Any:
            return
            yield

    async def settle() -> None:
        streams = Streams(Client(), [[1]], "interactive", 5)  # type: ignore[arg-type]
        try:
            await streams.settled()
        finally:
            await streams.stop()

    with pytest.raises(bench_gap.EngineError, match="a stream ended before all of them ran"):
        asyncio.run(settle())
