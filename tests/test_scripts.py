"""The scripts for a running server and for a GPU, as far as they run without either."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gpu_summary
import pytest
from flags_page import flags, flags_page, subcommands
from make_toy_tokenizer import toy_tokenizer

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
