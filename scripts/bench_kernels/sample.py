"""Check and time the sampling kernels against the floor of reading the logits once.

Tokens are compared with the torch reference on the same device: `wrong` counts rows that differ, of those checked. A
few in a million may, where the leads of two ids are closer than the logarithms' last bit. Then microseconds per call
in a graph, with PDL, over two sets of logits; `passes` is the time in units of the floor. Logits of few rows stay in
L2, as in a step, where the head has just written them. The lines that begin with `+` are the full variant's calls
before and after a token is chosen, over sequences of HISTORY tokens; there `wrong` counts rows whose adjusted logits or
most likely ids differ. Then calls are split into kernels, and the last lines are of tilings that are not the tables'.
`--smoke` runs it without a GPU, at tiny shapes and without meaning.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from bench_device import BYTES_PER_US, DEVICE, SMOKE
from graph_timer import median_us
from torch import Tensor

from asyncengine.config import MAX_TOP_LOGPROBS, PAGE_SIZE
from gpu_runner.kernels import reference_adjust, reference_sampling
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.kernel_compiler import KernelCompiler
from gpu_runner.kernels.reference_adjust import AdjustRows
from gpu_runner.kernels.reference_sampling import SamplingRows
from gpu_runner.kernels.result_layout import Results, result_words
from gpu_runner.kernels.sample import PROGRAMS, Sampler, Tiling
from gpu_runner.kernels.sample_full import FullSampling
from gpu_runner.kernels.step_meta import new_step_meta

VOCAB = 1000 if SMOKE else 151936
ROWS = (1, 3) if SMOKE else (1, 8, 64, 256, 512)
LAUNCHES = 2 if SMOKE else 16
HISTORY = 40 if SMOKE else 300
SMOKE_TILING = Tiling(block=256, num_warps=4, stages=1, programs=4)


@dataclass(frozen=True)
class Kind:
    """flat: logits of an untrained model, where top-p keeps most ids, and not those of a trained one."""

    name: str
    filtered: bool | None  # None: greedy
    parameters: dict[str, float]
    flat: bool = False


GREEDY = Kind("greedy", None, {"temperature": 0.0})
PLAIN = Kind("temperature", False, {})
TOP_P = Kind("top-p 0.9", True, {"top_p": 0.9})
FLAT = Kind("flat p 0.95", True, {"top_p": 0.95}, flat=True)
TOP_K = Kind("top-k 40", True, {"top_k": 40})
ALL = Kind("k p min-p", True, {"top_k": 200, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7})
NONE = Kind("filtered, off", True, {})
KINDS = (GREEDY, PLAIN, TOP_P, FLAT, TOP_K, ALL)
MORE_KINDS = (
    NONE,
    Kind("p 0.5", True, {"top_p": 0.5}),
    Kind("flat p 0.5", True, {"top_p": 0.5}, flat=True),
    Kind("flat p 0.1", True, {"top_p": 0.1}, flat=True),
    Kind("flat top-k 40", True, {"top_k": 40}, flat=True),
    Kind("flat k 2000", True, {"top_k": 2000}, flat=True),
    Kind("min-p 0.05", True, {"min_p": 0.05}),
)
"""Timed at the most rows only: what is rare, or takes more rounds than most."""


class Case:
    """One kind of sampling, at one number of rows, on two sets of logits."""

    def __init__(
        self,
        kind: Kind,
        rows: int,
        dtype: torch.dtype = torch.float32,
        tiling: Tiling | None = None,
        *,
        device: torch.device = DEVICE,
    ) -> None:
        self.kind, self.rows = kind, rows
        self.floor_us = rows * VOCAB * dtype.itemsize / BYTES_PER_US
        self.logits = [logits_of(kind, rows, device).to(dtype) for _ in range(2)]
        self.sampler = Sampler(max_rows=rows, vocab=VOCAB, device=device, tiling=SMOKE_TILING if SMOKE else tiling)
        self.out = torch.full((rows,), -7, dtype=torch.int32, device=device)
        self.state = DeviceState(num_slots=rows, pages_per_seq=1, device=device)
        self.state.temperature.fill_(kind.parameters.get("temperature", 1.0))
        self.state.top_k.fill_(int(kind.parameters.get("top_k", 0)))
        self.state.top_p.fill_(kind.parameters.get("top_p", 1.0))
        self.state.min_p.fill_(kind.parameters.get("min_p", 0.0))
        self.state.seed.copy_(torch.arange(rows) * 977 - 5)
        self.meta = new_step_meta(max_rows=rows, max_tokens=1, device=device)
        self.meta.counts[3] = rows
        for tensor in (self.meta.sample_row, self.meta.row_slot, self.meta.row_start):
            tensor.copy_(torch.arange(rows))
        self.meta.row_len.fill_(1)

    def launch(self, index: int) -> None:
        logits = self.logits[index % 2]
        if self.kind.filtered is None:
            self.sampler.greedy(logits, self.state, self.meta, self.out, bans_stop_ids=True)
        else:
            self.sampler.sample(
                logits, self.state, self.meta, self.out, filtered=self.kind.filtered, bans_stop_ids=True
            )

    def wrong(self) -> int:
        rows = SamplingRows(
            temperature=self.state.temperature,
            top_k=self.state.top_k,
            top_p=self.state.top_p,
            min_p=self.state.min_p,
            seed=self.state.seed,
            position=self.meta.row_start + 1,
        )
        logits = self.logits[0]
        self.out.fill_(-7)
        self.launch(0)
        if self.kind.filtered is None:
            expected = reference_sampling.greedy(logits.float())
        else:
            expected = reference_sampling.sample(logits.float(), rows, filtered=self.kind.filtered)
        return int((self.out != expected).sum())


def logits_of(kind: Kind, rows: int, device: torch.device) -> Tensor:
    logits = torch.randn(rows, VOCAB, device=device)
    if not kind.flat:
        logits *= 2.5
        logits[:, :: VOCAB // 20] += torch.rand(rows, len(range(0, VOCAB, VOCAB // 20)), device=device) * 15
    return logits


@dataclass(frozen=True)
class FullKind:
    """What every row asks. logprobs: -1 reports none."""

    name: str
    penalties: bool
    biases: int
    logprobs: int


FULL_KINDS = (
    FullKind("+ nothing", False, 0, -1),
    FullKind("+ penalties", True, 0, -1),
    FullKind("+ logprobs 5", False, 0, 5),
    FullKind("+ logprobs 20", False, 0, 20),
    FullKind("+ everything", True, 300, 20),
)


class FullCase(Case):
    """The full variant's own kernels."""

    def __init__(self, kind: FullKind, rows: int, *, device: torch.device = DEVICE) -> None:
        super().__init__(Kind(kind.name, True, {}), rows, device=device)
        self.full_kind = kind
        self.full = FullSampling(max_rows=rows, vocab=VOCAB, device=device)
        pages = -(-HISTORY // PAGE_SIZE)
        self.state = DeviceState(num_slots=rows, pages_per_seq=pages, device=device)
        self.state.page_table.copy_(1 + torch.randperm(rows * pages).view(rows, pages))
        self.page_tokens = torch.randint(0, VOCAB, (1 + rows * pages, PAGE_SIZE), dtype=torch.int32, device=device)
        self.state.prompt_len.fill_(HISTORY // 2)
        self.state.logprobs.fill_(kind.logprobs)
        self.state.repetition_penalty.fill_(1.2 if kind.penalties else 1.0)
        self.state.presence_penalty.fill_(0.5 if kind.penalties else 0.0)
        self.state.frequency_penalty.fill_(0.25 if kind.penalties else 0.0)
        self.state.num_bias.fill_(kind.biases)
        self.state.bias_ids.copy_(torch.arange(self.state.bias_ids.shape[1]) * 3)
        self.state.bias_values.fill_(0.01)
        self.meta.row_start.fill_(HISTORY - 1)
        self.results = Results.of(torch.zeros(result_words(rows), dtype=torch.int32, device=device))
        self.sampled = torch.arange(rows, dtype=torch.int32, device=device)

    def launch(self, index: int) -> None:
        logits = self.logits[index % 2]
        self.full.before(logits, self.state, self.meta, self.page_tokens)
        self.full.after(logits, self.sampled, self.state, self.meta, self.page_tokens, self.results)

    def wrong(self) -> int:
        logits = self.logits[0]
        before = logits.clone()
        self.launch(0)
        # Few rows at a time, so that the reference's counts stay small.
        parts = [slice(first, first + 16) for first in range(0, self.rows, 16)]
        return sum(self._wrong_of(part, before, logits) for part in parts)

    def _wrong_of(self, part: slice, before: Tensor, after: Tensor) -> int:
        state, wanted = self.state, self.full_kind.logprobs
        rows = AdjustRows(
            presence_penalty=state.presence_penalty[part],
            frequency_penalty=state.frequency_penalty[part],
            repetition_penalty=state.repetition_penalty[part],
            num_bias=state.num_bias[part],
            bias_ids=state.bias_ids[part],
            bias_values=state.bias_values[part],
            prompt_len=state.prompt_len[part],
            length=self.meta.row_start[part] + 1,
        )
        history = self.page_tokens[state.page_table[part]].flatten(1)
        wrong = (reference_adjust.adjust(before[part], history, rows) != after[part]).any(dim=1)
        if wanted >= 0:
            tops = reference_adjust.top_logprobs(
                before[part], self.sampled[part], state.logprobs[part], most=MAX_TOP_LOGPROBS
            )
            wrong |= (self.results.top_ids[part, :wanted] != tops.ids[:, :wanted]).any(dim=1)
            wrong |= (self.results.logprobs[part] - tops.chosen).abs() > 1e-4
        return int(wrong.sum())


def report(case: Case, note: str = "") -> None:
    wrong = case.wrong()
    took = median_us(case.launch, LAUNCHES)
    print(
        f"{case.kind.name:<14}{case.rows:>5}  wrong {wrong:>3} /{case.rows:>4}  {took:>8.1f} us"
        f"  floor {case.floor_us:>6.1f}  passes {took / case.floor_us:>6.2f}  {note}",
        flush=True,
    )


def kernels_of(case: Case) -> None:
    """Each kernel's mean time, launched one by one."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(6):
            case.launch(index)
        torch.cuda.synchronize()
    parts: list[Any] = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    times = ", ".join(f"{event.key.removesuffix('_kernel')} {event.device_time_total / 6:.1f}" for event in parts[:7])
    print(f"{case.kind.name:<14}{case.rows:>5}  us: {times}", flush=True)


TILINGS = (
    (GREEDY, 1, Tiling(2048, 4, 1, PROGRAMS)),
    (GREEDY, 1, Tiling(512, 2, 1, PROGRAMS)),
    (GREEDY, 512, Tiling(4096, 8, 1, 2 * PROGRAMS)),
    (GREEDY, 512, Tiling(2048, 8, 1, PROGRAMS)),
    (GREEDY, 512, Tiling(2048, 8, 1, 2 * PROGRAMS)),
    (GREEDY, 512, Tiling(2048, 8, 1, 4 * PROGRAMS)),
    (GREEDY, 512, Tiling(2048, 8, 2, 4 * PROGRAMS)),
    (GREEDY, 512, Tiling(2048, 4, 1, 4 * PROGRAMS)),
    *((kind, 512, Tiling(1024, 4, 3, more * PROGRAMS)) for kind in (PLAIN, TOP_P, TOP_K) for more in (1, 4, 8)),
    *((kind, 512, Tiling(1024, 4, 1, 2 * PROGRAMS)) for kind in (PLAIN, TOP_P)),
    *((kind, 512, Tiling(2048, 8, 3, 2 * PROGRAMS)) for kind in (PLAIN, TOP_P)),
    *((kind, 64, Tiling(1024, 4, 3, more * PROGRAMS)) for kind in (PLAIN, TOP_P) for more in (1, 4)),
)
"""Beside the tables'."""


def compile_kernels() -> None:
    """All that will be launched, many at a time; see `kernel_compiler`."""

    def rehearse() -> None:
        meta = torch.device("meta")
        for rows in ROWS:
            for kind in (GREEDY, PLAIN, TOP_P):
                Case(kind, rows, device=meta).launch(0)
            FullCase(FULL_KINDS[0], rows, device=meta).launch(0)
        for kind, rows, tiling in TILINGS:
            Case(kind, rows, tiling=tiling, device=meta).launch(0)

    start = time.perf_counter()
    with KernelCompiler(rehearse, threads=12) as compiler:
        done = compiler.wait(lambda ready, total: None)
    print(f"{done.kernels} kernels, {done.compiled} compiled, {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    torch.manual_seed(0)
    if not SMOKE:
        compile_kernels()
    for kind in KINDS:
        for rows in ROWS:
            report(Case(kind, rows))
    for full_kind in FULL_KINDS:
        for rows in ROWS:
            report(FullCase(full_kind, rows))
    many = ROWS[-1]
    for kind in MORE_KINDS:
        report(Case(kind, many))
    if SMOKE:
        return
    for kind, rows in ((GREEDY, 1), (TOP_P, 1), (TOP_P, many), (FLAT, many), (TOP_K, 1), (TOP_K, many)):
        kernels_of(Case(kind, rows))
    for rows in (1, many):
        kernels_of(FullCase(FULL_KINDS[-1], rows))
    for kind, rows, tiling in TILINGS:
        report(Case(kind, rows, tiling=tiling), str(tiling).removeprefix("Tiling"))


if __name__ == "__main__":
    main()
