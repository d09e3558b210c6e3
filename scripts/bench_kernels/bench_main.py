"""The command line of benchmarks that try many kernels: processes of the same script first compile a part of them each,
so that Triton's cache has all."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from bench_device import SMOKE


def parser_of(description: str | None, *, counts: str, default: str, smoke: str) -> argparse.ArgumentParser:
    """counts: the option that lists numbers of tokens or rows; default, smoke: its values, without and with --smoke."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smoke" if SMOKE else "0.6b,8b", help="names in bench_models.py")
    parser.add_argument(f"--{counts}", dest="counts", default=smoke if SMOKE else default)
    parser.add_argument("--workers", type=int, default=1 if SMOKE else 16, help="processes that compile")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter")
    parser.add_argument("--part", help="compile one part, for the parent process")
    return parser


def run(
    arguments: argparse.Namespace,
    compile_part: Callable[[list[str], list[int], int, int], None],
    measure: Callable[[str, list[int]], None],
) -> None:
    """compile_part: gets all models' names, the counts, and which of how many parts to launch once. measure: gets one
    model's name and the counts."""
    began = time.perf_counter()
    torch.manual_seed(0)
    names, counts = arguments.models.split(","), [int(count) for count in arguments.counts.split(",")]
    with torch.inference_mode():
        if arguments.part:
            part, parts = map(int, arguments.part.split("/"))
            compile_part(names, counts, part, parts)
            return
        if not SMOKE:
            _compile_all(arguments.workers)
            print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        for name in names:
            with nullcontext() if SMOKE else torch.cuda.stream(torch.cuda.Stream()):
                measure(name, counts)
            print(f"{name} after {time.perf_counter() - began:.0f} s", flush=True)


def _compile_all(workers: int) -> None:
    parts = [subprocess.Popen([sys.executable, *sys.argv, "--part", f"{part}/{workers}"]) for part in range(workers)]
    codes = [process.wait() for process in parts]
    if any(codes):
        raise SystemExit("a compiling process failed")
