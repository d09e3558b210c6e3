"""Times start-ups, from the start of a process to a device that is ready for its first step, phase by phase.

    python scripts/bench_startup.py [MODEL_FOLDER ...] [--write-weights FOLDER] [--device auto] [--json out.json]

MODEL_FOLDER needs a config.json only (default: the shapes in scripts/data). Each is started twice over a kernel cache
that is empty at first: cold, then warm. With --write-weights the last model's random weights are written there as
sharded safetensors first (16 GB for 8B) and it is started from them too, by the page cache, kernels warm and cold.

    ready      seconds from the process's start
    late       kernels that were compiled although the start-up's compiler had finished; 0 unless something is wrong
    host GiB   the process's peak resident memory
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
SHARD_BYTES = 4 << 30


def start(model: Path, load_format: str, device: str, began: float) -> dict[str, Any]:
    """In a process of its own: one start-up."""
    phases: list[tuple[str, float]] = [("imports", began)]

    def progress(phase: str, done: int, total: int) -> None:
        if phases[-1][0] != phase:
            phases.append((phase, time.time()))

    import msgspec

    from asyncengine.config import EngineConfig
    from asyncengine.engine_info import EngineInfo
    from asyncengine.startup_report import report
    from gpu_runner.device.build import build_executor
    from gpu_runner.schedule.scheduler import num_slots_for

    late = []
    if device != "cpu":
        from triton import knobs

        def compiled(*, repr: str, is_manual_warmup: bool, **_: object) -> None:
            if not is_manual_warmup:
                late.append(repr)

        knobs.runtime.jit_post_compile_hook = compiled
    config = EngineConfig(load_format=load_format, device=device, max_num_seqs=512, max_model_len=8192)  # type: ignore[arg-type]
    progress("CUDA context", 0, 0)
    executor = build_executor(config, str(model), progress, num_slots=num_slots_for(config.max_num_seqs))
    ended = time.time()
    ends = [at for _, at in phases[1:]] + [ended]
    seconds: dict[str, float] = {}
    for (name, begin), end in zip(phases, ends, strict=True):
        seconds[name] = seconds.get(name, 0.0) + end - begin
    info = EngineInfo(
        model=model.name, model_path=str(model), has_chat_template=False, **msgspec.structs.asdict(executor.info)
    )
    executor.close()
    return {
        "ready": ended - began,
        "seconds": seconds,
        "late": late,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "compiled": executor.info.kernels_compiled,
        "within_limit": executor.info.memory.used_bytes <= executor.info.memory.limit_bytes,
        "report": report(info),
    }


def write_weights(model: Path, folder: Path, device: str) -> None:
    """Random bfloat16 weights of the model's shapes, in shards of SHARD_BYTES and an index."""
    import torch
    from safetensors.torch import save_file

    from gpu_runner.models.registry import read_model_config
    from gpu_runner.models.weights import expected_shapes

    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text((model / "config.json").read_text())
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map, filled = {}, 0
    for name, shape in expected_shapes(read_model_config(str(model))).items():
        if filled > SHARD_BYTES:
            save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors")
            shards[-1].clear()
            shards.append({})
            filled = 0
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=where).normal_(0.0, 0.02)
        shards[-1][name] = tensor.cpu()
        weight_map[name] = f"model-{len(shards):05}.safetensors"
        filled += tensor.nbytes
    save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def run(name: str, model: Path, cache: str, device: str, *, load_format: str = "dummy") -> dict[str, Any]:
    command = [sys.executable, __file__, "--start", str(model), load_format, device, str(time.time())]
    done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed with code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) | {"name": name}
    print(f"\n{name}: ready after {result['ready']:.1f} s", *result["report"], sep="\n  ", flush=True)
    return result


def table(results: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(phase for result in results for phase in result["seconds"]))
    width = max(len(result["name"]) for result in results)
    print(f"\n{'':<{width}} {'ready':>6}", *(f"{name:>{max(8, len(name))}}" for name in names), end="")
    print(f" {'compiled':>8} {'late':>4} {'host GiB':>8} {'limit':>6}")
    for result in results:
        cells = (f"{result['seconds'].get(name, 0.0):>{max(8, len(name))}.2f}" for name in names)
        print(f"{result['name']:<{width}} {result['ready']:>6.1f}", *cells, end="")
        print(f" {result['compiled']:>8} {len(result['late']):>4} {result['host_gib']:>8.2f}", end="")
        print(f" {'holds' if result['within_limit'] else 'BROKEN':>6}")
    for result in results:
        for late in result["late"]:
            print(f"late in {result['name']}: {late[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[DATA / "qwen3-0.6b", DATA / "llama-3.1-8b"])
    parser.add_argument("--write-weights", type=Path, metavar="FOLDER")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        model, load_format, device, began = args.start
        print(json.dumps(start(Path(model), load_format, device, float(began))))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            cache = f"{folder}/{model.name}"
            results.append(run(f"{model.name} random, cold", model, cache, args.device))
            results.append(run(f"{model.name} random, warm", model, cache, args.device))
        if args.write_weights:
            model, begin = args.models[-1], time.time()
            write_weights(model, args.write_weights, args.device)
            print(f"\nwrote {args.write_weights} in {time.time() - begin:.1f} s", flush=True)
            for kernels, where in (("warm", f"{folder}/{model.name}"), ("cold", f"{folder}/again")):
                name = f"{model.name} files, {kernels}"
                results.append(run(name, args.write_weights, where, args.device, load_format="auto"))
    table(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
