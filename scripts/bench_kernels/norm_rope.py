"""Check and time the row-wise kernels, the start of a step and its end, against the floor of the bytes they move.

Times are of a graph of launches over input sets that L2 cannot hold (where the rows are many); the floor is at the
device's bandwidth. Few rows cannot reach it: a launch costs 0.75 us whatever it does. `--smoke` runs it without a GPU,
at tiny shapes and without meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_device import BYTES_PER_US, DEVICE, DTYPE, SMOKE
from graph_timer import median_us
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.kernels import norm_rope, reference
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.host_ring import HostRing
from gpu_runner.kernels.post_update import post_update_to_host
from gpu_runner.kernels.result_layout import Results, result_words
from gpu_runner.kernels.step_meta import new_step_meta, step_meta
from gpu_runner.kernels.upload_layout import Upload, pack, upload_words
from gpu_runner.kernels.work_list import allocate_work_list

ROTATED_BYTES = 1 << 12 if SMOKE else 256 << 20
MOST_SETS = 2 if SMOKE else 32
LAUNCHES = 2 if SMOKE else 32
EPS = 1e-6
PAGE = 16
ROWS = (1, 3) if SMOKE else (1, 64, 2048)


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool


MODELS = (
    (Model("smoke", 40, 72, 3, 1, 16, True),)
    if SMOKE
    else (Model("0.6b", 1024, 3072, 16, 8, 128, True), Model("8b", 4096, 14336, 32, 8, 128, False))
)


@dataclass(frozen=True)
class Case:
    """launch(i) runs on input set i; error() is that of a launch just done against the reference. read_by_address: what
    launches read without holding it."""

    name: str
    moved_bytes: int
    sets: int
    launch: Callable[[int], object]
    error: Callable[[], float]
    read_by_address: Tensor | None = None


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def sets_for(moved_bytes: int) -> int:
    return max(2, min(MOST_SETS, -(-ROTATED_BYTES // moved_bytes)))


def norm_case(model: Model, rows: int) -> Case:
    moved = 2 * rows * model.hidden * DTYPE.itemsize
    sets = sets_for(moved)
    x, weight = [rand(rows, model.hidden) for _ in range(sets)], rand(model.hidden)
    out = [torch.empty_like(x[0]) for _ in range(sets)]

    def launch(index: int) -> None:
        norm_rope.rms_norm(x[index], weight, EPS, out=out[index])

    def error() -> float:
        out[0].fill_(torch.nan)
        launch(0)
        return relative(out[0], reference.rms_norm(x[0], weight, EPS))

    return Case(f"norm {model.name}", moved, sets, launch, error)


def qk_case(model: Model, rows: int) -> Case:
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    moved = 2 * rows * width * DTYPE.itemsize
    sets = sets_for(moved)
    num_pages = -(-rows // PAGE) + 1
    qkv = [rand(rows, width) for _ in range(sets)]
    kv_shape = (2, num_pages, model.kv_heads, PAGE, model.head_dim)
    kv = [torch.zeros(kv_shape, dtype=DTYPE, device=DEVICE) for _ in range(sets)]
    out = [torch.empty(rows, model.heads, model.head_dim, dtype=DTYPE, device=DEVICE) for _ in range(sets)]
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE) * 61
    kv_index = torch.randperm(rows, device=DEVICE).to(torch.int32) + PAGE
    inv_freq = (5e5 ** -(torch.arange(0, model.head_dim, 2) / model.head_dim)).to(DEVICE)
    norms = (rand(model.head_dim), rand(model.head_dim)) if model.qk_norm else (None, None)
    norm: dict[str, Any] = {"num_heads": model.heads, "q_norm": norms[0], "k_norm": norms[1], "eps": EPS}

    def launch(index: int) -> None:
        arguments = {**norm, "out": out[index]}
        norm_rope.qk_norm_rope_write(qkv[index], positions, kv_index, inv_freq, kv[index], **arguments)

    def error() -> float:
        expected_kv = torch.zeros_like(kv[0])
        cos_sin = reference.rope_cos_sin(positions, inv_freq)
        expected = reference.qk_norm_rope_write(qkv[0], cos_sin, expected_kv, kv_index.long(), **norm)
        out[0].fill_(torch.nan)
        launch(0)
        return max(relative(out[0], expected), relative(kv[0], expected_kv))

    return Case(f"qk+rope+kv {model.name}", moved, sets, launch, error)


def silu_case(model: Model, rows: int) -> Case:
    moved = 3 * rows * model.inner * DTYPE.itemsize
    sets = sets_for(moved)
    gate_up = [rand(rows, 2 * model.inner) for _ in range(sets)]
    out = [torch.empty(rows, model.inner, dtype=DTYPE, device=DEVICE) for _ in range(sets)]

    def launch(index: int) -> None:
        norm_rope.silu_mul(gate_up[index], out=out[index])

    def error() -> float:
        out[0].fill_(torch.nan)
        launch(0)
        return relative(out[0], reference.silu_mul(gate_up[0]))

    return Case(f"silu*up {model.name}", moved, sets, launch, error)


def embedding_case(model: Model, rows: int) -> Case:
    moved = 2 * rows * model.hidden * DTYPE.itemsize
    table = rand(50 if SMOKE else 50_000, model.hidden)
    token_ids = [torch.randint(len(table), (rows,), dtype=torch.int32, device=DEVICE) for _ in range(MOST_SETS)]
    out = torch.empty(rows, model.hidden, dtype=DTYPE, device=DEVICE)

    def launch(index: int) -> None:
        norm_rope.embedding(token_ids[index], table, out=out)

    def error() -> float:
        out.fill_(torch.nan)
        launch(0)
        return relative(out, table[token_ids[0].long()])

    return Case(f"embedding {model.name}", moved, MOST_SETS, launch, error)


def step_cases(decode_rows: int, chunk: int, bucket: int) -> list[Case]:
    """A step of decode rows and one prefill chunk: its first kernel, which fetches the plan if there is no chunk, and
    its last, which delivers the results. Both use the host's memory."""
    num_slots, pages_per_seq = (8, 4) if SMOKE else (512, 512)
    rows = decode_rows + (chunk > 0)
    state = DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=DEVICE)
    state.kv_len.random_(0, pages_per_seq * PAGE - 8)
    state.page_table.random_(1, 1000)
    state.limit.fill_(1 << 30)
    state.stop_ids.fill_(-1)
    meta = new_step_meta(max_rows=num_slots, max_tokens=bucket, device=DEVICE)
    page_tokens = torch.zeros(1000, PAGE, dtype=torch.int32, device=DEVICE)
    slots = np.random.default_rng(0).permutation(num_slots).astype(np.int32)[:rows]
    starting = slots[decode_rows:]
    lengths = np.array([1] * decode_rows + [chunk] * (chunk > 0), dtype=np.int32)
    ones, cells = np.ones(len(starting), dtype=np.float32), np.arange(-(-chunk // PAGE), dtype=np.int32)
    whole = np.zeros(len(starting), dtype=np.int32)
    upload = Upload(
        num_decode_rows=decode_rows,
        row_slot=slots,
        row_start=np.zeros(rows, dtype=np.int32),
        row_len=lengths,
        prefill_tokens=np.arange(chunk, dtype=np.int32),
        sample_row=np.arange(rows, dtype=np.int32),
        sample_token=np.cumsum(lengths, dtype=np.int32) - 1,
        page_slot=np.full(len(cells), slots[-1], dtype=np.int32),
        page_index=cells,
        page_id=cells + 1,
        start_slot=starting,
        temperature=ones,
        top_k=whole,
        top_p=ones,
        min_p=ones,
        seed=whole.astype(np.int64),
        limit=whole + (1 << 30),
        min_tokens_until=whole,
        stop_ids=np.full((len(starting), MAX_STOP_IDS), -1, dtype=np.int32),
        prompt_len=whole,
        presence_penalty=ones,
        frequency_penalty=ones,
        repetition_penalty=ones,
        logprobs=whole,
        constrained=whole,
        num_bias=whole,
        bias_cell=whole[:0],
        bias_id=whole[:0],
        bias_value=ones[:0],
    )
    words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=bucket)
    host = torch.zeros(words, dtype=torch.int32, pin_memory=not SMOKE)
    used = pack(upload, host.numpy())
    device_upload = host.to(DEVICE)
    sampled = torch.arange(rows, dtype=torch.int32, device=DEVICE) + 5
    results = torch.zeros(result_words(num_slots), dtype=torch.int32, pin_memory=not SMOKE)
    ring = HostRing.allocate(1, DEVICE)
    ring.connect([(host, results)])
    work = allocate_work_list(
        max_rows=num_slots,
        max_tokens=max(bucket, num_slots),
        num_heads=16,
        num_kv_heads=8,
        head_dim=16,
        window=None,
        device=DEVICE,
    )

    def start(index: int) -> None:
        step_meta(
            *(device_upload, state, meta, page_tokens),
            num_tokens=bucket,
            ring=None if chunk else ring,
            work=work,
            prefill=chunk > 0,
        )

    def end(index: int) -> None:
        post_update_to_host(sampled, state, meta, ring, device_upload, num_slots=num_slots)

    def start_error() -> float:
        meta.positions.fill_(-7)
        start(0)
        begins = state.kv_len[torch.from_numpy(slots).long().to(DEVICE)].tolist()
        expected = begins[:decode_rows] + list(range(chunk)) + [0] * (bucket - decode_rows - chunk)
        return float(sum(a != b for a, b in zip(meta.positions.tolist(), expected, strict=True)))

    def end_error() -> float:
        results.fill_(-7)
        end(0)
        if not SMOKE:
            torch.cuda.synchronize()
        tokens = Results.of(results).tokens.tolist()
        return float(
            sum(a != b for a, b in zip(tokens, [*range(5, 5 + rows), *[-7] * (num_slots - rows)], strict=True))
        )

    name = f"{decode_rows}+{chunk}"
    return [
        Case(f"step_meta {name}", 4 * (used + 3 * bucket), 1, start, start_error, host),
        Case(f"post_update {name}", 4 * 4 * num_slots, 1, end, end_error, host),
    ]


def cases() -> list[tuple[int, Case]]:
    """(rows or tokens, case)."""
    found = []
    for model in MODELS:
        for rows in ROWS:
            found += [(rows, norm_case(model, rows)), (rows, qk_case(model, rows)), (rows, silu_case(model, rows))]
        found += [(rows, embedding_case(model, rows)) for rows in (ROWS[0], ROWS[-1])]
    for decode_rows, chunk, bucket in (
        ((1, 0, 1), (2, 5, 9)) if SMOKE else ((1, 0, 1), (256, 0, 256), (100, 1900, 2048))
    ):
        found += [(bucket, case) for case in step_cases(decode_rows, chunk, bucket)]
    return found


def time_us(case: Case) -> float:
    """Median time of one launch among many in a graph."""
    return median_us(lambda index: case.launch(index % case.sets), max(LAUNCHES, case.sets))


def main() -> None:
    print(f"{'kernel':18} {'rows':>5} {'error':>8} {'us':>7} {'floor':>6} {'GB/s':>6}")
    failed = False
    for rows, case in cases():
        error = case.error()
        failed |= not error < 5e-3
        us = time_us(case)
        floor = case.moved_bytes / BYTES_PER_US
        print(
            f"{case.name:18} {rows:5} {error:8.1e} {us:7.2f} {floor:6.2f} {case.moved_bytes / us / 1e3:6.0f}",
            flush=True,
        )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
