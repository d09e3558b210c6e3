"""The scripts for a running server and for a GPU, as far as they run without either."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_step
import gpu_summary
import profile_gaps
import pytest
import step_engine
from bench_kv_transfer import WAYS, CopyingEngine, measure_beside, measure_copies
from bench_sampling import WAYS as SAMPLING_WAYS
from bench_sampling import allow_all_but
from bench_sampling import measure as measure_sampling
from bench_step import choose_longer, longest_context, measure_serving
from flags_page import flags, flags_page, subcommands
from lanes.gaps import Gap, Interval, analyse, merged, overlaps, step_gaps
from make_toy_tokenizer import toy_tokenizer
from step_engine import ClosedLoop, Engine, end_rows, start_rows
from torch.autograd import DeviceType

from asyncengine.config import PAGE_SIZE, EngineConfig
from detokenizer_proc.vocabulary import Vocabulary

GPU_CHECK = Path(__file__).parents[1] / "scripts" / "gpu_check.sh"
DOCS = Path(__file__).parents[1] / "docs"

SCRIPTS = GPU_CHECK.parent


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_whatever_a_script_imports_is_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (SCRIPTS, SCRIPTS / "bench_kernels"):
        monkeypatch.syspath_prepend(str(folder))
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            assert all(find_spec(name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert find_spec(node.module) is not None, node.module


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
    """Steps of 100 us: three kernels, in every second one four, and a copy that is none; before them, the host's wait
    for the GPU."""

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
            fetched = 2 * (step % 2)
            if fetched:
                yield made_up_event(DeviceType.CUDA, "_fetch_kernel", begin + 4, begin + 6)
            yield made_up_event(DeviceType.CUDA, "step_meta_kernel", begin + 4 + fetched, begin + 8)
            yield made_up_event(DeviceType.CUDA, "forward", begin + 8, begin + 60)
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
    results = profile_gaps.profile_model(tiny_model, [1, 3], Namespace(context=8, steps=10, serving=None))
    for result, batch in zip(results, (1, 3), strict=True):
        assert (result["batch"], result["step_us"], result["busy_us"], result["busy_share"]) == (batch, 100, 90, 0.9)
        fetched = 5 / 9  # of nine steps
        assert result["kernels_per_step"] == pytest.approx(3 + fetched)
        assert result["idle_us"] == {"p50": 10, "p99": 10, "max": 10}
        kernels: dict[str, tuple[float, float]] = {"forward": (52, 1), "sample": (34, 1)}
        kernels |= {"step_meta_kernel": (4 - 2 * fetched, 1), "_fetch_kernel": (2 * fetched, fetched)}
        assert [name for name, *_ in result["kernels"]] == list(kernels)
        for name, *found in result["kernels"]:
            assert found == pytest.approx(kernels[name])
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


def test_a_closed_loop_replaces_each_request_that_ends(tiny_model: Path) -> None:
    engine = Engine(tiny_model, EngineConfig(device="cpu", load_format="dummy", max_num_seqs=4, kv_cache_tokens=4096))
    loop = ClosedLoop(engine, 4, 8, 12)
    prompts = tokens = 0
    for _ in range(60):
        plan = loop.turn()
        assert len(engine.scheduler.rids()) == 4
        if plan is not None:
            prompts += len(plan.prefill_tokens)
            tokens += int(plan.row_samples.sum())
    loop.end()
    assert not engine.scheduler.has_work
    assert not engine.in_flight
    assert prompts % 8 == 0
    assert 4 + 4 * 60 // (12 + 3) <= prompts // 8 <= 4 + 4 * 60 // 12  # an end is known two steps later
    row = measure_serving(engine, 4, 8, 12)
    assert row["tokens_per_s"] * row["ms"] / 1e3 == pytest.approx(tokens / 59, abs=0.5)
    assert 0 < row["share_with_prompts"] * 8 <= row["prompt_tokens_per_step"]
    engine.executor.close()


def test_steps_are_timed_again_with_as_much_more_context_as_fits(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_step, "WARM_STEPS", 2)
    sizes = "--batches 2 --steps 4 --prefill 1x8 --max-num-batched-tokens 16 --max-model-len 464 --kv-cache-tokens 1024"

    def run(context: int) -> dict[str, Any]:
        out = tiny_model / "out.json"
        flags = f"--device cpu {sizes} --context {context}".split()
        monkeypatch.setattr(sys, "argv", ["bench_step.py", str(tiny_model), *flags, "--json", str(out)])
        bench_step.main()
        [result] = json.loads(out.read_text())
        return dict(result)

    longest = longest_context(464, steps=4)
    assert longest == 464 - 400 - 4 + 2 + 2, "a row is that long when half of its steps are measured"
    result = run(40)
    # prompts are of whole tokens, and the second row is a step behind the first
    assert result["decode"][0]["context"] == pytest.approx(40, abs=0.5)
    assert result["longer"]["context"] == pytest.approx(longest, abs=0.5)
    assert run(longest)["longer"] is None
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(longest + 1)
    output = capsys.readouterr()
    assert "--context 65 is not from 1 to 64, what --max-model-len 464 has room for with --steps 4" in output.err
    assert output.out == "", "no model has been loaded"


def test_the_longer_context_leaves_half_of_the_cache_and_of_a_step_free(tiny_model: Path) -> None:
    config = EngineConfig(
        device="cpu",
        load_format="dummy",
        max_num_seqs=32,
        max_num_batched_tokens=32,
        max_model_len=1024,
        kv_cache_tokens=4096 - PAGE_SIZE,
    )
    engine = Engine(tiny_model, config)
    executor = engine.executor  # with the dummy page 4096 tokens

    def choice(batches: list[int], context: int) -> tuple[int, int] | None:
        return choose_longer(executor, batches, context, steps=20)

    assert choice([1, 4, 32], 16) == (4, 64)
    assert choice([1, 16, 32], 32) == (16, 128)
    assert choice([1, 16, 32], 33) == (1, 132)
    assert choice([16, 32], 33) == (16, 128), "less than four times, but it fits"
    assert choice([16, 32], 109) is None, "19 tokens more, and 20 steps"
    assert choice([32], 16) is None
    executor.close()


def test_rows_that_never_decode_all_at_once_are_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_engine, "SPARE_STEPS", 5)
    config = EngineConfig(
        device="cpu", load_format="dummy", max_num_seqs=4, max_num_batched_tokens=16, kv_cache_tokens=512
    )
    engine = Engine(tiny_model, config)
    with pytest.raises(SystemExit, match="4 rows with prompts of 60 tokens never decode all at once"):
        start_rows(engine, 4, 60, 1)
    assert start_rows(engine, 4, 12, 1) == 14.5
    end_rows(engine, 4)
    engine.executor.close()


# ------------------------------------------------------------------------------------------------- copies of pages


def test_copies_of_pages_are_timed_alone_and_beside_steps(tiny_model: Path) -> None:
    config = EngineConfig(
        device="cpu", load_format="dummy", max_num_seqs=2, kv_cache_tokens=2048, kv_host_memory_gib=0.001
    )
    engine = CopyingEngine(tiny_model, config, most_pages=3)
    alone = [measure_copies(engine, way, 2, repeats=1) for way in WAYS]
    assert [(row["way"], row["gb_per_s"] > 0) for row in alone] == [(way, True) for way in WAYS]
    beside = measure_beside(engine, 2, context=24, steps=2)
    assert [(row["way"], row["gb_per_s"] > 0) for row in beside] == [("none", False), *((way, True) for way in WAYS)]
    assert beside[0]["slower"] == 0
    engine.executor.close()
    with pytest.raises(SystemExit, match="3000 pages each way are more than"):
        CopyingEngine(tiny_model, config, most_pages=3000)


def test_every_way_of_choosing_tokens_is_timed_beside_greedy_rows(tiny_model: Path) -> None:
    config = EngineConfig(load_format="dummy", device="cpu", max_num_seqs=4, max_model_len=512, kv_cache_tokens=2048)
    engine = Engine(tiny_model, config)
    allow_all_but(engine, engine.executor.model_config.eos_ids)
    for way in SAMPLING_WAYS:
        total, row = measure_sampling(engine, 4, context=24, steps=2, way=way, rows=2)
        assert total > row > 0, way
    engine.executor.close()


# ------------------------------------------------------------------------------------------------ the check of a GPU


def test_without_a_gpu_the_check_says_so_and_a_wrong_part_is_named() -> None:
    def run(*args: str, **environ: str) -> tuple[int, str]:
        result = subprocess.run([GPU_CHECK, *args], env=os.environ | environ, capture_output=True, text=True)
        return result.returncode, result.stderr

    assert run(PYTHON="false") == (1, "gpu_check.sh needs an NVIDIA GPU, and torch sees none\n")
    code, message = run("nothing", DEVICE="cpu", PYTHON="false")
    assert code == 2
    assert "has no part nothing" in message


STAND_IN = r"""#!/bin/sh
case "$*" in
*vocab_size*) echo 300 ;;
*asyncengine.cli\ serve*)
  sleep 60 &
  trap 'kill $!; exit 0' TERM
  echo "Ready: m at http://127.0.0.1:1"
  wait
  ;;
*rate_at_load.py*) echo "10 5" ;;
*asyncengine.cli\ bench* | *bench_gap.py* | *check_recovery.py*) echo "$@" >>"$OUT/runs" ;;
esac
"""


def test_no_two_runs_of_the_check_send_the_same_prompts(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    model, out = str(tmp_path), tmp_path / "out"
    environ = {"PYTHON": str(python), "OUT": str(out), "DEVICE": "cpu", "CLASS_MODEL": model, "SERVE_MODELS": model}
    parts = ("serve", "classes", "step_time", "recovery")
    result = subprocess.run([GPU_CHECK, *parts], env=os.environ | environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = [line.split() for line in (out / "runs").read_text().splitlines()]
    assert len(runs) == 3 + 4 + 1 + 1
    assert len({run[run.index("--seed") + 1] for run in runs}) == len(runs)


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
    alone = [{"way": "load", "pages": pages, "gb_per_s": pages / 10} for pages in (8, 512)]
    beside = [{"rows": 64, "way": way, "slower": 0.021, "gb_per_s": 48.0} for way in ("none", "load")]
    moved = [{"model": "m", "programs": 16, "copies": alone, "beside": beside}]
    (tmp_path / "copies-m.json").write_text(json.dumps(moved))
    run = {"ok": 4, "requests": 4, "output_tokens_per_s": 1650.0, "ttft_ms": {"p50": 5.25}, "tpot_ms": {"p50": 0.6}}
    for streams in (256, 1):
        (tmp_path / f"serve-m-0.6b-{streams}.json").write_text(json.dumps(run))
    mixed = {"class": "interactive", "requests": 9, "columns": ["TTFT p50", "within %"]}
    mixed |= {"real": [40.25, 5000.0], "simulated": [20.0, 99.0], "error": [-50.3, None]}
    (tmp_path / "compare-m.json").write_text(json.dumps({"runs": [{"run": "m-mixed", "rows": [mixed]}]}))
    (tmp_path / "steptime-m-mixed.json").write_text(json.dumps({"mean": 0.05, "max": 0.25, "last": 0.04}))
    beside_prompt = {"class": "background", "run": 1, "streams": 32, "prompt": 32768, "ttft_ms": 900.5, "error": 0.02}
    beside_prompt |= {"gap_ms": {"p50": 50.0, "p99": 51.25, "max": 60.0}}
    cut = {"steps": 17, "chunk": 2016.0, "device_ms": {"p50": 49.0, "max": 50.0}}
    (tmp_path / "beside-m.json").write_text(json.dumps([beside_prompt, beside_prompt | cut]))
    killed = {
        "killed": "server",
        "streams": 64,
        **dict.fromkeys(("equal", "equal_in_peace", "gap", "control")),
        "back_s": [0.25, None],
        "gpu_mib": [120000, 3],
        "ok": False,
    }
    lost = {"killed": "gpu_runner", "streams": 64, "equal": 0, "equal_in_peace": 1, "gap": [0.0312, 0.025], "ok": True}
    lost |= {"control": {"found": 15, "of": 16, "median_gap": 4.56}, "back_s": [15.5, 15.75], "gpu_mib": [9, 9]}
    (tmp_path / "recovery-m.json").write_text(json.dumps([lost, killed]))
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
        "| copies | programs | way | GB/s | beside rows | slower | GB/s then |",
        "| m | 16 | load | 51.2 | 64 | 2.1 % | 48.0 |",
        "| HTTP | streams | ok | out tok/s | TTFT p50 ms | TPOT p50 ms |",
        "| m-0.6b | 1 | 4 of 4 | 1,650 | 5.25 | 0.60 |",
        "| m-0.6b | 256 | 4 of 4 | 1,650 | 5.25 | 0.60 |",
        "| real (error of simulated) | class | TTFT p50 | within % |",
        "| mixed | interactive 9 | 40.2 (-50) | 5,000 |",
        "| predicted step times off | mean | max | last |",
        "| m-mixed | 5.0 % | 25.0 % | 4.0 % |",
        "| gaps | class, run | streams | p50 ms | p99 | max | TTFT ms | steps | chunk | device ms | max | off |",
        "| m | background 1 | 32 beside 32768 | 50.0 | 51.2 | 60.0 | 900 | - | - | - | - | 2.0 % |",
        "| m | background 1 | 32 beside 32768 | 50.0 | 51.2 | 60.0 | 900 | 17 | 2016 | 49.0 | 50.0 | 2.0 % |",
        "| recovery | killed | text equal | in peace | gap | control | back s | GPU MiB |  |",
        "| m | gpu_runner | 0 of 64 | 1 of 64 | 0.031, 0.025 | 15 of 16, 4.6 | 15.50, 15.75 | 9 -> 9 | ok |",
        "| m | server | - | - | - | - | 0.25, never | 120000 -> 3 | FAILED |",
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


# ------------------------------------------------------------------------------------------------- what is documented


def test_the_page_of_flags_says_what_the_parser_does() -> None:
    assert (DOCS / "flags.md").read_text() == flags_page(), "run: python scripts/flags_page.py > docs/flags.md"
    for name, parser in subcommands().items():
        documented = {flag.names for flag in flags(parser)}
        assert all(f"`{option}`" in " ".join(documented) for option in options(parser)), name


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"\b(?:docs|scripts|tests)/[\w./-]*\w", (DOCS.parent / page).read_text())
    assert [name for name in named if not (DOCS.parent / name).exists()] == []


def test_the_serving_guide_names_flags_that_exist() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", (DOCS / "serving.md").read_text()))
    assert named <= options(subcommands()["serve"])


def options(parser: argparse.ArgumentParser) -> set[str]:
    """As its help shows them."""
    return {*re.findall(r"--[a-z-]+", parser.format_help())} - {"--help"}


def test_a_flag_without_a_unit_or_a_default_is_refused_by_name() -> None:
    for more in ({"help": "x (default: 1)"}, {"metavar": "N", "help": "x"}):
        parser = argparse.ArgumentParser()
        parser.add_argument("--new", **more)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`--new` needs"):
            flags(parser)
