"""Compiles a tiny model's kernels for a GPU that is not there, and prints as JSON what was done: a line for each of
its input, which is one of these lists as JSON.

    [MODEL_FOLDER]
    [MODEL_FOLDER, "--names", TOKENS]
    [MODEL_FOLDER, "--layouts", TOKENS, KERNEL, ...]
    [MODEL_FOLDER, "--batch-invariant"]
    [MODEL_FOLDER, "--every-layer"]
    [MODEL_FOLDER, "--order", TOKENS]

With an option nothing is compiled to its end. What is printed is the name of each kernel that an engine of 64 rows and
steps of up to TOKENS tokens would have, or a batch-invariant one; or of each that an engine would have if it rehearsed
every layer of the model, and of each that it has. --layouts: beside each name, of the kernels named, what Triton has
compiled when every tensor has its layout, and else null. --order: of each of such an engine's graphs, every launch in
order, a kernel's name and whether it lets the next one start behind its own wait only; of an engine of 96 rows.

A process of its own: the tests' one runs Triton's interpreter instead of its compiler.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from asyncengine.config import PAGE_SIZE, EngineConfig
from gpu_runner.device import build_gpu
from gpu_runner.kernels.kernel_compiler import KernelCompiler, _launches_go_to
from gpu_runner.models.registry import read_model_config, sketch_model

KV_CACHE_TOKENS = 256


class Hopper:
    """As much of a driver as the compiler asks for."""

    def __init__(self) -> None:
        self.launchers: list[str] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers.append(source.name)


def made_up_build(model: str, config: EngineConfig) -> build_gpu.GpuBuild:
    with (
        patch("torch.cuda.mem_get_info", return_value=(1 << 36, 1 << 36)),
        patch("torch.cuda.memory_reserved", return_value=0),
        patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        return build_gpu.GpuBuild(
            config,
            read_model_config(model),
            device=torch.device("cuda", 0),
            dtype=torch.bfloat16,
            num_slots=config.max_num_seqs + 1,
            progress=lambda phase, done, total: None,
            graphs=True,
        )


def find_kernels(rehearse: Callable[[], None]) -> dict[tuple[str, str, str], tuple[Any, str]]:
    """As `KernelCompiler` keeps them."""
    with patch.object(KernelCompiler, "_compile"), KernelCompiler(rehearse, threads=1) as compiler:
        compiler.wait(lambda done, total: None)
    return compiler._found


def list_kernels(rehearse: Callable[[], None]) -> list[str]:
    """With what each is compiled for."""
    return [f"{name} {key}" for _, name, key in find_kernels(rehearse)]


class Stopped(Exception):
    """A compilation was; with what it had made."""


def stop_behind_layouts(backend: Any = None, stages: Any = None, *_: object) -> tuple[str, str] | None:
    """As Triton calls it: for its part of a kernel's key, and to be told of the stages that it may change."""
    if stages is None:
        return "layouts", "layouts"

    def stop(module: Any, metadata: object) -> None:
        raise Stopped(str(module))

    stages["llir"] = stop
    return None


def list_layouts(rehearse: Callable[[], None], wanted: Sequence[str]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = stop_behind_layouts
        for (_, name, _), (function, specialization_data) in find_kernels(rehearse).items():
            layouts = None
            if name in wanted:
                try:
                    function.preload(specialization_data)
                except Stopped as stopped:
                    layouts = str(stopped)
            found.append((name, layouts))
    return found


def works_of_every_layer(build: build_gpu.GpuBuild) -> list[Callable[[], None]]:
    decoder = sketch_model(build._model, dtype=build._dtype, ops=build._ops(build_gpu.META))
    num_pages = KV_CACHE_TOKENS // PAGE_SIZE + 1
    step = build._make_step(decoder, build._model, build_gpu.META, num_pages=num_pages)
    return [work for kind in step.works() for work, _ in kind]


def rehearse_every_layer(build: build_gpu.GpuBuild) -> None:
    for work in works_of_every_layer(build):
        work()


def list_launches(build: build_gpu.GpuBuild) -> list[list[tuple[str, bool]]]:
    """Of each graph. A kernel that never lets the next one start does so at its end."""
    graphs: list[list[tuple[str, bool]]] = []

    def note(*, fn: Any, **_: object) -> bool:
        source = fn.jit_function.src
        trigger = source.find("gdc_launch_dependents")
        graphs[-1].append((fn.name.rpartition(".")[2], trigger < 0 or source.index("gdc_wait") < trigger))
        return True

    with torch.inference_mode(), _launches_go_to(note):
        for work in works_of_every_layer(build):
            graphs.append([])
            work()
    return graphs


def done(hopper: Hopper, model: str, *options: str) -> Any:
    config = EngineConfig(
        load_format="dummy", max_num_seqs=1, max_num_batched_tokens=16, kv_cache_tokens=KV_CACHE_TOKENS
    )
    if options == ("--every-layer",):
        build = made_up_build(model, config)
        return [list_kernels(lambda: rehearse_every_layer(build)), list_kernels(build._rehearse)]
    if options:
        tokens = int(options[1]) if options[0] in ("--names", "--layouts", "--order") else 512
        config = msgspec.structs.replace(
            config,
            max_num_seqs=96 if options[0] == "--order" else 64,
            max_num_batched_tokens=tokens,
            kv_cache_tokens=2 * tokens,
            batch_invariant=options == ("--batch-invariant",),
        )
        build = made_up_build(model, config)
        if options[0] == "--order":
            return list_launches(build)
        if options[0] == "--layouts":
            return list_layouts(build._rehearse, options[2:])
        return [kernel.split()[0] for kernel in list_kernels(build._rehearse)]
    build = made_up_build(model, config)
    results, progress = [], []
    for _ in range(2):
        with KernelCompiler(build._rehearse, threads=2) as compiler:
            compiled = compiler.wait(lambda *now: progress.append(now))
        known = sum(key in function.device_caches[0][0] for (*_, key), (function, _) in compiler._found.items())
        results.append((compiled.kernels, compiled.compiled, known))
    return {"results": results, "launchers": hopper.launchers, "progress": progress}


def main() -> None:
    hopper = Hopper()
    driver.set_active(hopper)
    for line in sys.stdin:
        try:
            answer = {"done": done(hopper, *json.loads(line))}
        except Exception:  # noqa: BLE001 - told to the test that asked, and the next one is answered
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
