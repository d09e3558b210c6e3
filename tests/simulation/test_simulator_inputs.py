"""What the simulator reads and writes: traces, step models and their fit, the command."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fit_step_model
import msgspec
import numpy as np
import pytest
import simulate
from simulation.step_model import Coefficients, StepModel, StepModelFile, along, read_step_model
from simulation.traces import OUTPUT_IDS, TraceRequest, endless_cache_hits, load_trace, scaled, with_urgent

SAMPLE = Path(__file__).parents[1] / "chaos" / "data" / "azure_conversation.csv"
MODEL_FILES = sorted((Path(__file__).parents[2] / "scripts" / "step_models").glob("*.json"))
TINY = {"gpu": "none", "model": "tiny", "max_model_len": 8192, "kv_cache": {"tokens": 65536, "bytes_per_token": 1}}

# ----------------------------------------------------------------------------------------------------------- traces


def mooncake(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()))
    return str(path)


def test_a_csv_trace_has_prompts_that_share_nothing() -> None:
    trace = load_trace(str(SAMPLE), limit=3)
    assert [(r.at_ns, r.prompt_tokens, r.output_tokens) for r in trace] == [
        (0, 181, 230),
        (50_000_000, 373, 74),
        (200_000_000, 4078, 87),
    ]
    prompts = [request.prompt() for request in trace]
    assert [len(prompt) for prompt in prompts] == [181, 373, 4078]
    assert len(np.unique(np.concatenate(prompts))) == 181 + 373 + 4078
    assert endless_cache_hits(trace) == 0


def test_equal_hash_ids_of_a_mooncake_trace_are_equal_tokens(tmp_path: Path) -> None:
    rows = [(3000, 1100, 5, [4, 5, 9]), (0, 600, 7, [4, 6]), (1000, 700, 1, [4, 6])]
    trace = load_trace(mooncake(tmp_path / "m.jsonl.gz", rows))
    first, second, third = (request.prompt() for request in trace)
    assert [request.at_ns // 10**9 for request in trace] == [0, 1, 3]
    assert [len(prompt) for prompt in (first, second, third)] == [600, 700, 1100]
    assert np.array_equal(second[:600], first)
    assert np.array_equal(third[:512], first[:512])
    assert third[512] != first[512]
    assert third.max() < OUTPUT_IDS
    # of the second's 600 equal tokens whole pages count, of the third's 512 all
    assert endless_cache_hits(trace) == 592 + 512


def test_an_endless_cache_leaves_a_token_to_compute_and_knows_only_prefixes() -> None:
    requests = [
        TraceRequest(0, 0, 1024, 1, blocks=(1, 2)),
        TraceRequest(1, 0, 1024, 1, blocks=(1, 2)),
        TraceRequest(2, 0, 1024, 1, blocks=(3, 2)),
    ]
    assert endless_cache_hits(requests) == 1008


def test_lengths_and_shared_blocks_are_scaled_together(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "m.jsonl.gz", [(0, 1024, 100, [1, 2]), (0, 1024, 100, [1, 3])])
    trace = load_trace(path, length_scale=0.25)
    assert [(r.prompt_tokens, r.output_tokens, r.block_tokens) for r in trace] == [(256, 25, 128)] * 2
    assert np.count_nonzero(trace[0].prompt() == trace[1].prompt()) == 128


def test_times_are_scaled_and_the_urgent_are_drawn_from_the_seed() -> None:
    trace = load_trace(str(SAMPLE), limit=200)
    assert [request.at_ns for request in scaled(trace, 0.5)[:3]] == [0, 25_000_000, 100_000_000]
    urgent = [request.priority for request in with_urgent(trace, 0.25, seed=1)]
    assert urgent == [request.priority for request in with_urgent(trace, 0.25, seed=1)]
    assert urgent != [request.priority for request in with_urgent(trace, 0.25, seed=2)]
    assert 20 < urgent.count(0) < 80


def test_sharegpt_is_the_packaged_lengths_all_at_once() -> None:
    trace = load_trace("sharegpt", limit=2001)
    assert {request.at_ns for request in trace} == {0}
    assert trace[2000].prompt_tokens == trace[0].prompt_tokens


@pytest.mark.parametrize("content", ["", "seconds,prompt,output\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match="has no requests"):
        load_trace(str(path))


def test_hash_ids_that_have_no_token_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hash_ids must be below 2097152, got 2097152"):
        load_trace(mooncake(tmp_path / "m.jsonl.gz", [(0, 10, 1, [2097152])]))


# ------------------------------------------------------------------------------------------------------ step models


def test_a_base_is_linear_between_its_places_and_goes_on_beyond_them() -> None:
    assert [along(x, (1, 3, 7), (10.0, 20.0, 60.0)) for x in (1, 2, 3, 5, 7, 9)] == [10, 15, 20, 40, 60, 80]


def test_coefficients_that_say_nothing_are_refused() -> None:
    costs = {"sampled_row_us": 0.0, "decode_context_us": 0.0, "prefill_pair_us": 0.0}
    for places in ((1,), (2, 1), (1, 2, 3)):
        with pytest.raises(ValueError, match="ascending places"):
            StepModel(
                Coefficients(base_tokens=places, base_us=(1.0, 2.0), host_rows=(1, 2), host_us=(1.0, 1.0), **costs)
            )


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_the_files_hold_what_their_figures_give(path: Path) -> None:
    content = json.loads(path.read_text())
    coefficients = fit_step_model.fit(content["figures"])
    assert read_step_model(path).coefficients == coefficients
    assert fit_step_model.errors(content["figures"], coefficients) == content["errors"]
    fitted = [abs(row["error_percent"]) for row in content["errors"] if row["point"] == "fitted"]
    # the points of a served load are averages over steps of many kinds
    assert max(fitted) < (9 if path.stem.endswith("served") else 8)
    assert all(figures["source"] for name, figures in content["figures"].items() if name != "layers")
    assert fit_step_model.dump(content) == path.read_text()


def test_the_fit_finds_the_coefficients_that_made_the_figures() -> None:
    truth = Coefficients(
        base_tokens=(1, 8, 2048),
        base_us=(500.0, 700.0, 4000.0),
        sampled_row_us=0.5,
        decode_context_us=0.025,
        prefill_pair_us=0.0004,
        host_rows=(1, 8),
        host_us=(60.0, 70.0),
    )
    model = StepModel(truth)
    assert fit_step_model.fit(made_figures(model, layers=10)) == truth


def test_steps_of_serving_show_what_decode_rows_and_chunks_cost_together() -> None:
    truth = Coefficients(
        base_tokens=(1, 8, 512, 2048),
        base_us=(500.0, 700.0, 2500.0, 4000.0),
        sampled_row_us=0.5,
        decode_context_us=0.025,
        prefill_pair_us=0.0004,
        mixed_us=300.0,
        host_rows=(1, 8),
        host_us=(60.0, 70.0),
    )
    model = StepModel(truth)
    buckets, steps = [256, 512, 768], [1, 2, 1]
    served = []
    for pairs in (0, 20_000):
        times = [
            model.time_ns(tokens=bucket, sampled=200, context=50_000, pairs=pairs, mixed=pairs > 0)
            for bucket in buckets
        ]
        row = {"streams": 256, "rows": 200, "prompt_tokens": 100, "sampled": 200, "context_tokens": 50_000}
        served.append(
            row | {"pairs": pairs, "buckets": buckets, "steps": steps, "ms": np.average(times, weights=steps) / 1e6}
        )
    figures = made_figures(model, layers=10) | {"served": {"base_tokens": [512], "ms": served}}
    assert fit_step_model.fit(figures) == truth


def made_figures(model: StepModel, layers: int) -> dict[str, Any]:
    decode = [
        {"batch": b, "context": 300, "ms": model.time_ns(tokens=b, sampled=b, context=300 * b, pairs=0) / 1e6}
        for b in (1, 8)
    ]
    runs = []
    for count, length in ((16, 2048), (64, 512)):
        pairs = count * length * (length + 1) // 2
        us = 16 * 4000.0 + 0.5 * count + 0.0004 * pairs
        runs.append({"count": count, "length": length, "tokens_per_s": 1e6 * count * length / us})
    return {
        "layers": layers,
        "decode": {"ms": decode},
        "attention": {"us_per_layer": [{"context_tokens": n, "us": 9 + n * 0.025 / layers} for n in (1000, 5000)]},
        "head": {"us": [{"rows": rows, "us": 40 + 0.5 * rows} for rows in (256, 512)]},
        "prefill": {"step_tokens": 2048, "runs": runs},
        "host": {"us": [{"rows": 1, "us": 60.0}, {"rows": 8, "us": 70.0}]},
    }


def test_a_run_of_bench_step_takes_the_place_of_the_figures_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(next(file for file in MODEL_FILES if "served" not in file.stem).read_text())
    name = json.loads(path.read_text())["model"]
    decode = [{"batch": b, "context": 128, "ms": 2.0 + b / 100, "host_us": 50.0 + b} for b in (1, 64, 512)]
    prefill = [
        {"count": count, "length": length, "tokens_per_s": 40e3 + length, "first_ms": 50.0}
        for count, length in ((1, 2000), (64, 512), (16, 2048))
    ]
    mixed = {"batch": 64, "context_tokens": 8192.0, "pairs": 2e6, "steps": 5, "ms": 50.0}
    longer = decode[-1] | {"context": 1128, "ms": decode[-1]["ms"] + 0.01 * 512}
    result = {"model": name, "step_tokens": 2048, "decode": decode, "longer": longer, "prefill": prefill}
    result |= {"mixed": mixed, "serving": []}
    figures = fit_step_model.with_bench_step(json.loads(path.read_text())["figures"], result, "a test")
    coefficients = fit_step_model.fit(figures)
    assert coefficients.base_tokens == (1, 64, 512, 2048)
    assert coefficients.decode_context_us == 0.01
    assert (coefficients.host_rows, coefficients.host_us) == ((1, 64, 512), (51.0, 114.0, 562.0))
    measured = {row["what"]: row["error_percent"] for row in fit_step_model.errors(figures, coefficients)}
    assert {"decode, batch 64, context 128", "64 rows beside a chunk"} <= measured.keys()
    again = fit_step_model.with_bench_step(figures, result | {"mixed": None}, "another")
    assert (again["mixed"]["source"], again["decode"]["source"]) == ("a test", "another"), "what was left out stays"
    assert measured["decode, batch 512, context 1128"] == 0.0


def test_a_file_is_made_of_a_run_of_bench_step_alone() -> None:
    truth = StepModel(
        Coefficients(
            base_tokens=(1, 64, 256),
            base_us=(1000.0, 1630.0, 9000.0),
            sampled_row_us=5.0,
            decode_context_us=0.25,
            prefill_pair_us=0.004,
            host_rows=(1, 64),
            host_us=(50.0, 60.0),
        )
    )

    def decode(batch: int, context: int) -> dict[str, float]:
        ns = truth.time_ns(tokens=batch, sampled=batch, context=batch * context, pairs=0)
        return {"batch": batch, "context": context, "ms": ns / 1e6, "host_us": 50 + (batch - 1) / 6.3}

    def prefill(count: int, length: int) -> dict[str, float]:
        steps, pairs = count * length // 256, count * length * (length + 1) // 2
        us = 9000.0 * steps + 5.0 * count + 0.004 * pairs
        return {"count": count, "length": length, "tokens_per_s": 1e6 * count * length / us, "first_ms": us / 1e3}

    ns = truth.time_ns(tokens=256, sampled=63, context=2000, pairs=100_000)
    result = {
        "model": "made-up",
        "device": "cpu",
        "max_model_len": 2048,
        "kv_cache_tokens": 4096,
        "kv_bytes_per_token": 512,
        "step_tokens": 256,
        "decode": [decode(1, 16), decode(64, 16)],
        "longer": decode(64, 64),
        "prefill": [prefill(1, 256), prefill(4, 512), prefill(16, 256)],
        "mixed": {"batch": 63, "context_tokens": 2000.0, "pairs": 100_000.0, "steps": 5, "ms": ns / 1e6},
        "serving": [],
    }
    content = fit_step_model.new_file(result, "a test")
    found = fit_step_model.fit(content["figures"])
    assert found.sampled_row_us == pytest.approx(5.0, rel=1e-2)
    assert found.base_us == pytest.approx((1000.0, 1630.0, 9000.0), rel=1e-3)
    assert found.decode_context_us == pytest.approx(0.25)
    assert found.prefill_pair_us == pytest.approx(0.004, rel=1e-2)
    rows = fit_step_model.errors(content["figures"], found)
    assert max(abs(row["error_percent"]) for row in rows if row["point"] != "left out") < 5
    content["coefficients"] = msgspec.to_builtins(found)
    assert msgspec.convert(content, StepModelFile).kv_cache.tokens == 4096
    with pytest.raises(SystemExit, match="a test: no model can be made of made-up, for which it left out longer; run"):
        fit_step_model.new_file(result | {"longer": None}, "a test")


# ---------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    coefficients = Coefficients(
        base_tokens=(1, 2049),
        base_us=(1000.0, 9192.0),
        sampled_row_us=1.0,
        decode_context_us=0.01,
        prefill_pair_us=0.0001,
        host_rows=(1, 64),
        host_us=(60.0, 70.0),
    )
    content: dict[str, Any] = TINY | {"coefficients": msgspec.to_builtins(coefficients)}
    content["kv_cache"] = content["kv_cache"] | {"source": "made up"}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_the_command_prints_a_line_per_load_and_policy_and_writes_what_it_found(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    simulate.main(
        [
            *(str(SAMPLE), "--model", tiny_model, "--requests", "60", "--load", "0.5,0.9", "--length-scale", "0.1"),
            *("--policies", "fcfs,longest", "--json", str(out), "--png", str(picture)),
        ]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines if line[:1] == ["load"]] == [
        ["load", load, policy] for load in ("0.5", "0.9") for policy in ("fcfs", "longest")
    ]
    rows = json.loads(out.read_text())["rows"]
    assert [row["ended"] for row in rows] == [60] * 4
    assert rows[0]["ttft_ms"]["p99"] < rows[2]["ttft_ms"]["p99"], "more load, longer waits"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_drives_a_closed_loop(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["sharegpt", "--model", tiny_model, "--requests", "20", "--concurrency", "4", "--policies", "fcfs"])
    assert "4 at once         fcfs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.csv"], "No such file"),
        ([str(SAMPLE), "--policies", "best"], "there is no policy best; there are fcfs, priority, shortest, longest"),
        ([str(SAMPLE), "--load", "0"], "a load must be above 0"),
        ([str(SAMPLE), "--urgent", "2"], "--urgent from 0 to 1"),
        ([str(SAMPLE), "--requests", "0"], "must be at least 1"),
        ([str(SAMPLE), "--max-num-batched-tokens", "8"], "must be at least --max-num-seqs"),
        ([str(SAMPLE), "--model", str(SAMPLE)], "JSON is malformed"),
        (["sharegpt", "--load", "0.5"], "needs a trace with times"),
    ],
)
def test_the_command_refuses_what_it_cannot_use(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        simulate.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
