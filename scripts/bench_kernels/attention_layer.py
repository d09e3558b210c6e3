"""A decode step's attention between its linear layers: one kernel, with keys in registers or streamed, against two, by
tiling and by cut of the keys.

    python scripts/bench_kernels/attention_layer.py [--smoke] [--shape qwen|llama] [--many]

Each time is what a layer's attention adds to a graph of LAYERS times (qkv linear, attention, output linear), with
programmatic dependent launch and keys, values and weights of its own for each layer, over the same graph with the
linears alone. Errors come first. --many: steps of 16 to 512 rows instead, by what is served and its twins, streamed or
not. --smoke: tiny shapes under Triton's interpreter, to see that the script runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention import LLAMA, QWEN, SMOLLM, Case, Shape, Step, decode_case, ragged_case
from bench_device import BYTES_PER_US, DEVICE, DTYPE, SMOKE
from graph_timer import median_us
from torch import Tensor

from gpu_runner.kernels.attention_decode import decode_attention, streamed_decode_attention
from gpu_runner.kernels.attention_fused import FusedTiling, fused_decode_attention, fused_tiling
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.decode_way import choose_decode
from gpu_runner.kernels.norm_rope import qk_norm_rope_write
from gpu_runner.kernels.reference import rope_cos_sin
from gpu_runner.kernels.residual import NormedLinear, Residual
from gpu_runner.kernels.work_list import LARGE_CUT, MULTIPROCESSORS, RangeCut, WorkList

LAYERS = 28
MOST_WEIGHT_BYTES = 4e9
MOST_KV_BYTES = 60e9
"""Steps that read more have keys and values of fewer layers, which take turns."""
EPS = 1e-6
BASE = 1e6
CONTEXTS = {
    1: (256, 1000, 8000, 32000),
    2: (256, 1000, 4000, 16000),
    4: (256, 1000, 4000),
    6: (1000, 4000),
    8: (256, 400, 1000, 4000),
    9: (4000,),
    12: (1000, 4000),
    16: (256, 400, 1000, 4000),
    20: (750, 1000, 4000),
    24: (500, 4000),
    32: (256, 500, 1000),
    48: (1000,),
    64: (256, 1000),
    256: (256,),
}
"""Of equal rows, by their number."""
RAGGED = ((4, 1000), (8, 1000), (16, 400), (16, 3000), (32, 1500), (48, 600), (64, 300), (64, 1000), (128, 600))
"""Rows and their mean length."""
MANY_CONTEXTS = {**dict.fromkeys((16, 32, 48, 64, 128, 256), (256, 1000, 4000)), 512: (256, 1000)}
MANY_RAGGED = (
    *((16, 400), (16, 3000), (32, 1500), (48, 600), (64, 300), (64, 1000), (128, 300), (128, 600)),
    *((256, 300), (256, 1000), (512, 300)),
)


@dataclass(frozen=True)
class Choice:
    """tiling: None is the pair of kernels, or the one that streams."""

    tiling: FusedTiling | None
    cut: RangeCut
    streams: bool = False

    @property
    def label(self) -> str:
        apart = "stream" if self.streams else "pair"
        kernel = apart if self.tiling is None else f"{self.tiling.warp_keys}x{self.tiling.num_warps}"
        at_once = self.cut.at_once // MULTIPROCESSORS
        programs = f"r{at_once}" if at_once else str(self.cut.programs // MULTIPROCESSORS)
        return f"{kernel} {programs}/{self.cut.split_step}"


PAIR = Choice(None, RangeCut(MULTIPROCESSORS, 64))


class Layers:
    """The step with what a layer's attention takes and what stands around it."""

    def __init__(self, shape: Shape, hidden: int, case: Case, *, layers: int) -> None:
        self.step = step = Step(shape, case, layers=layers)
        rows = step.num_tokens
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        half = shape.head_dim // 2
        self.inv_freq = (BASE ** -(torch.arange(half, device=DEVICE) / half)).float()
        self.rotation = rope_cos_sin(torch.arange(int(step.starts.max()) + 1, device=DEVICE), self.inv_freq)
        sets = max(1, min(layers, int(MOST_WEIGHT_BYTES // (2 * (width + shape.heads * shape.head_dim) * hidden))))

        def weights(*size: int) -> Tensor:
            return torch.randn(size, dtype=DTYPE, device=DEVICE) / size[-1] ** 0.5

        self.qkv_weights = [weights(width, hidden) for _ in range(sets)]
        self.o_weights = [weights(hidden, shape.heads * shape.head_dim) for _ in range(sets)]
        self.norm = torch.ones(hidden, dtype=DTYPE, device=DEVICE)
        self.q_norm, self.k_norm = (1 + 0.1 * weights(2, shape.head_dim)).unbind()
        self.residual = weights(rows, hidden)
        self.qkv = weights(rows, width) * width**0.5
        shapes = [(width, hidden), (hidden, shape.heads * shape.head_dim)]
        self.ops = CudaOps.for_weights(shapes, max_tokens=rows, device=DEVICE)

    def work(self, choice: Choice) -> WorkList:
        """Raises RuntimeError if it leaves keys out."""
        work = self.step.work(choice.cut)
        self.step.build(work)
        items = work.items[: int(work.lengths[0])]
        listed, keys = int((items[:, 3] - items[:, 2]).sum()), int((self.step.starts + 1).sum())
        if listed != keys:
            raise RuntimeError(f"{choice.label} lists {listed} of {keys} keys")
        return work

    def attend(self, qkv: Tensor, kv_layer: Tensor, work: WorkList, choice: Choice) -> Tensor:
        step = self.step
        shared: dict[str, Any] = {"counts": step.counts, "page_table": step.page_table, "scale": step.scale}
        norms: dict[str, Any] = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        if choice.tiling is None and not choice.streams:
            q = qk_norm_rope_write(
                qkv, step.positions, step.kv_index, self.inv_freq, kv_layer, num_heads=step.shape.heads, **norms
            )
            out = torch.empty_like(q)
            decode_attention(q, kv_layer, out, work, **shared)
            return out
        out = torch.empty_like(step.q)
        shared |= {"positions": step.positions, "kv_index": step.kv_index, "rotation": self.rotation, **norms}
        if choice.tiling is None:
            streamed_decode_attention(qkv, kv_layer, out, work, **shared)
        else:
            fused_decode_attention(qkv, kv_layer, out, work, tiling=choice.tiling, **shared)
        return out

    def layer(self, index: int, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        sets = len(self.qkv_weights)
        residual = Residual(self.residual)
        qkv = self.ops.norm_linear(residual, NormedLinear(self.norm, EPS, self.qkv_weights[index % sets], None))
        out = attend(qkv, self.step.kv[index % self.step.layers])
        self.ops.linear_add(out.flatten(1), self.o_weights[index % sets], None, residual, None)

    def time(self, choice: Choice | None) -> float:
        """us a layer; None: with the linears alone."""
        work = self.work(choice or PAIR)

        def attend(qkv: Tensor, kv_layer: Tensor) -> Tensor:
            return self.step.q if choice is None else self.attend(qkv, kv_layer, work, choice)

        def layers(_: int) -> None:
            for index in range(LAYERS):
                self.layer(index, attend)

        return median_us(layers, 1) / LAYERS

    def error(self, choice: Choice) -> tuple[float, float]:
        """Relative differences from the pair of kernels, of the output and of what is in the pages."""
        results = []
        for each in (PAIR, choice):
            kv_layer = self.step.kv[0].clone()
            work = self.work(each)
            results.append((self.attend(self.qkv, kv_layer, work, each).float(), kv_layer.float()))
        (out, kv_layer), (other, other_kv) = results
        return float((other - out).norm() / out.norm()), float((other_kv - kv_layer).norm() / kv_layer.norm())


def compile_in_parallel(shape_name: str, count: int, *, many: bool) -> None:
    """Each choice's kernel into Triton's cache, in processes of their own."""
    command = [sys.executable, __file__, "--shape", shape_name, *(["--many"] if many else []), "--compile"]
    children = [subprocess.Popen([*command, str(index)]) for index in range(count)]
    for child in children:
        child.wait()


def served_choices() -> list[Choice]:
    """What `decode_way` has, in rounds (r) of so many programs to a multiprocessor or cut into so many; as a pair and
    streamed what is either."""
    ways = [
        choose_decode(rows, prefill=False, fuses=fuses, long=long)
        for fuses, long, most in ((True, False, 129), (True, True, 32), (False, False, 129))
        for rows in range(1, most + 1)
    ]
    served = dict.fromkeys(
        Choice(fused_tiling(way.fused_warps, 256) if way.fused_warps else None, way.cut, way.streams) for way in ways
    )
    apart = [choice for choice in served if choice.tiling is None]
    return list(dict.fromkeys([*served, *(replace(choice, streams=not choice.streams) for choice in apart)]))


def choices() -> list[Choice]:
    """What is served, and others."""
    large, small = FusedTiling(32, 8), FusedTiling(32, 4)
    others = [(large, 1, 512), (large, 8, 512), (small, 2, 128), (small, 2, 512)]
    return [
        *served_choices(),
        *(Choice(tiling, RangeCut(programs * MULTIPROCESSORS, step)) for tiling, programs, step in others),
    ]


def errors(shape: Shape, hidden: int, choices: list[Choice], case: Case) -> None:
    layers = Layers(shape, hidden, case, layers=1)
    for choice in choices:
        out, pages = layers.error(choice)
        print(f"{shape.name} {choice.label}: differs from the pair by {out:.1e}, in the pages by {pages:.1e}")


def table(shape: Shape, hidden: int, choices: list[Choice], cases: list[Case]) -> None:
    print(
        f"\n{shape.name}: us of attention in a layer; MB of keys and values, and their floor; keys of a warp x warps, "
        "programs to an SM / least range"
    )
    print(f"{'':>12} {'linears':>8} {'MB':>6} {'floor':>6} " + " ".join(f"{choice.label:>11}" for choice in choices))
    for case in cases:
        moved = sum(case.decode_lens) * shape.token_bytes
        layers = Layers(shape, hidden, case, layers=min(LAYERS, max(1, int(MOST_KV_BYTES // moved))))
        floor = moved / BYTES_PER_US
        alone = layers.time(None)
        times = [layers.time(choice) - alone for choice in choices]
        print(
            f"{case.name:>12} {alone:8.2f} {moved / 1e6:6.1f} {floor:6.2f} " + " ".join(f"{us:11.2f}" for us in times)
            + f"   best {min(times):.2f}, {100 * floor / max(min(times), 1e-9):.0f} %",
            flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--shape", choices=("qwen", "llama"), default="qwen")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--compile", type=int, help="only compile this choice")
    options = parser.parse_args()
    if SMOKE:
        shape = replace(SMOLLM, heads=3, kv_heads=1)
        smoked = [PAIR, Choice(FusedTiling(16, 2), LARGE_CUT), replace(PAIR, streams=True)]
        errors(shape, 48, smoked, Case("smoke", [40, 1, 300], []))
        return
    shape, hidden = (QWEN, 1024) if options.shape == "qwen" else (LLAMA, 4096)
    candidates = served_choices() if options.many else choices()
    ragged = Case("ragged", [1, 257, 3000, 17, 64, 65, 700], [])
    if options.compile is not None:
        Layers(shape, 64, decode_case(16 if options.many else 1, 20), layers=1).error(candidates[options.compile])
        return
    start = time.monotonic()
    compile_in_parallel(options.shape, len(candidates), many=options.many)
    print(f"compiled in {time.monotonic() - start:.1f} s")
    errors(shape, 64, candidates, ragged)
    equal, uneven = (MANY_CONTEXTS, MANY_RAGGED) if options.many else (CONTEXTS, RAGGED)
    cases = [decode_case(rows, context) for rows, contexts in equal.items() for context in contexts]
    cases += [ragged_case(*size) for size in uneven]
    table(shape, hidden, candidates, cases)
    print(f"done in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
