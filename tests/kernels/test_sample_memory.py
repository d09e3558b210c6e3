"""The sampling kernels stay in their tensors, whatever the number of rows and the vocabulary."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.fenced_memory import FencedMemory
from torch import Tensor

from gpu_runner.kernels import reference_sampling, sample
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.reference_sampling import SamplingRows
from gpu_runner.kernels.sample import Sampler, Tiling
from gpu_runner.kernels.step_meta import StepMeta, new_step_meta

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS: tuple[dict[str, float], ...] = (
    {"top_p": 0.3},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 790},
    {"top_p": 0.02},
    {"min_p": 0.5},
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_k": 700},
)
VARIANTS: tuple[bool | None, ...] = (None, False, True)
"""`filtered`; None is greedy."""


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def last_index_of(self, name: str) -> int | None:
        """The largest index of a tensor that any program reads or writes; None of those that are not a Sampler's."""
        arguments = self.arguments
        rows = len(arguments["logits"])
        if name in ("part_best", "part_score", "part_token"):
            # Of open rows, as many as there are programs share those; any more have one part each.
            return max(self.programs, rows) - 1
        if name == "group_best":
            return self.programs * int(arguments["LANES"]) - 1
        if name in ("candidate_x", "candidate_id"):
            return rows * int(arguments["CAPACITY"]) - 1
        if name in ("open_rows", "open_count"):
            # A round leaves its rows to the next one's.
            lists = int(arguments.get("round", -1)) + 2
            return lists * rows - 1 if name == "open_rows" else max(lists, int(arguments.get("ROUNDS", 0))) - 1
        if name == "logits":
            return (rows - 1) * int(arguments["row_stride"]) + int(arguments["vocab"]) - 1
        if name.startswith("row_") and name not in ("row_slot", "row_start", "row_len", "row_stride"):
            return rows - 1
        return rows - 1 if name in ("out", "arrived", "num_candidates") else None


class Recorder:
    """Stands in for a kernel: notes its launches, and runs none."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches
        self._names = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(self._names, args, strict=False)) | kwargs
            assert set(self._names) <= arguments.keys()
            self._launches.append(Launch(self._kernel.fn.__name__, grid, arguments))

        return launch


@pytest.mark.parametrize("max_rows", [1, 8, 256, 512, 1100])
@pytest.mark.parametrize("vocab", [17, 49152, 128256, 151936])
def test_every_index_of_any_number_of_rows_has_a_place(
    max_rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []
    for name in [name for name in vars(sample) if name.endswith("_kernel")]:
        monkeypatch.setattr(sample, name, Recorder(getattr(sample, name), launches))
    meta = torch.device("meta")
    state = DeviceState(num_slots=1, pages_per_seq=1, device=meta)
    step_meta = new_step_meta(max_rows=1, max_tokens=1, device=meta)
    sampler = Sampler(max_rows=max_rows, vocab=vocab, device=meta)
    all_logits, all_out = torch.empty(max_rows, vocab, device=meta), torch.empty(max_rows, device=meta)
    checked = set()
    for rows in range(1, max_rows + 1) if max_rows < 1000 else (1055, 1056, 1057, 1100):
        launches.clear()
        logits, out = all_logits[:rows], all_out[:rows]
        for filtered in VARIANTS:
            choose(sampler, filtered, logits, state, step_meta, out)
        for launch in launches:
            for name, tensor in launch.arguments.items():
                if isinstance(tensor, Tensor) and (last := launch.last_index_of(name)) is not None:
                    assert last < tensor.numel() < 2**31, (launch.kernel, rows, name)
                    checked.add(id(tensor))
            if "parts" in launch.arguments:
                parts, part_size = launch.arguments["parts"], launch.arguments["part_size"]
                assert launch.grid == (parts, rows)
                assert (parts - 1) * part_size < vocab <= parts * part_size
            elif launch.kernel == "finish_kernel":
                assert launch.grid == (rows,)
    scratch = {name: tensor for name, tensor in vars(sampler).items() if isinstance(tensor, Tensor)}
    assert [name for name, tensor in scratch.items() if id(tensor) not in checked] == []


def choose(
    sampler: Sampler, filtered: bool | None, logits: Tensor, state: DeviceState, meta: StepMeta, out: Tensor
) -> None:
    if filtered is None:
        sampler.greedy(logits, state, meta, out, bans_stop_ids=True)
    else:
        sampler.sample(logits, state, meta, out, filtered=filtered, bans_stop_ids=True)


class FencedStep:
    """Rows of every kind, in slots and with a sampler that lie between fences."""

    def __init__(self, *, max_rows: int, vocab: int, candidates: int = sample.CANDIDATES) -> None:
        self.max_rows, self.vocab = max_rows, vocab
        self.memory = memory = FencedMemory()
        self.sampler = Sampler(max_rows=max_rows, vocab=vocab, device=DEVICE, candidates=candidates)
        for name, tensor in list(vars(self.sampler).items()):
            if isinstance(tensor, Tensor):
                setattr(self.sampler, name, memory.copy(tensor) if name == "_arrived" else memory.poisoned(tensor))
        kinds = [KINDS[row % len(KINDS)] for row in range(max_rows)]
        state = DeviceState(num_slots=max_rows, pages_per_seq=1, device=DEVICE)
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            getattr(state, name).copy_(torch.tensor([kind.get(name, default) for kind in kinds]))
        state.seed.copy_(torch.arange(max_rows) * 977 - 5)
        state.min_tokens_until.fill_(2**20)
        state.stop_ids.fill_(-1)
        state.stop_ids[:, 0] = vocab - 1
        state.stop_ids[:, 1] = vocab
        for name, tensor in list(vars(state).items()):
            setattr(state, name, memory.copy(tensor))
        self.state = state
        meta = new_step_meta(max_rows=max_rows, max_tokens=1, device=DEVICE)
        for tensor in (meta.sample_row, meta.row_slot, meta.row_start):
            tensor.copy_(torch.arange(max_rows))
        meta.row_len.fill_(1)
        used = ("counts", "row_slot", "row_start", "row_len", "sample_row")
        self.meta = replace(meta, **{name: memory.copy(getattr(meta, name)) for name in used})

    def check(self, rows: int, samples: int) -> None:
        """All variants' tokens of `samples` rows, in calls of `rows`."""
        logits = torch.randn(rows, self.vocab, generator=torch.Generator().manual_seed(rows)) * 0.7
        chosen = SamplingRows(
            **{name: getattr(self.state, name)[:samples].cpu() for name in ("temperature", "top_k", "top_p", "min_p")},
            seed=self.state.seed[:samples].cpu(),
            position=self.meta.row_start[:samples].cpu() + 1,
        )
        self.meta.counts[3] = samples
        for filtered in VARIANTS:
            given = self.memory.copy(logits.to(DEVICE))
            out = self.memory.poisoned(torch.zeros(rows, dtype=torch.int32, device=DEVICE))
            with self.memory.watched():
                choose(self.sampler, filtered, given, self.state, self.meta, out)
            expected = torch.zeros(rows, dtype=torch.int64)
            kept = logits[:samples].clone()
            kept[:, self.vocab - 1] = -math.inf
            if filtered is None:
                expected[:samples] = reference_sampling.greedy(kept)
            else:
                expected[:samples] = reference_sampling.sample(kept, chosen, filtered=filtered)
            assert torch.equal(out.cpu().to(torch.int64), expected), (rows, samples, filtered)


def test_no_number_of_rows_reads_or_writes_beside_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Tiling(block=128, num_warps=4, stages=1, programs=10, rounds=2, groups=32)
    monkeypatch.setattr(sample, "FEW_ROWS", 2)
    monkeypatch.setattr(sample, "FEW_ROWS_TILING", few)
    monkeypatch.setattr(sample, "SAMPLE_TILING", replace(few, programs=14, rounds=3, groups=128))
    monkeypatch.setattr(sample, "GREEDY_TILING", replace(few, programs=12))
    step = FencedStep(max_rows=6, vocab=791, candidates=16)
    for rows in (1, 2, 3, 6):
        step.check(rows, rows)
    step.check(6, 1)


@pytest.mark.parametrize(("rows", "vocab"), [(40, 17), (1, 49152)])
def test_the_tables_own_tilings_stay_in_their_tensors(rows: int, vocab: int) -> None:
    FencedStep(max_rows=rows, vocab=vocab).check(rows, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
def test_a_gpus_calls_of_up_to_512_rows_write_nothing_beside_their_tensors(vocab: int) -> None:
    step = FencedStep(max_rows=512, vocab=vocab)
    for rows in (1, 2, 8, 16, 17, 64, 255, 256, 512):
        step.check(rows, rows)


def test_more_rows_than_there_is_place_for_are_refused() -> None:
    step = FencedStep(max_rows=2, vocab=17)
    logits, out = torch.zeros(3, 17, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for filtered in VARIANTS:
        with pytest.raises(ValueError, match="place for 2 rows"):
            choose(step.sampler, filtered, logits, step.state, step.meta, out)
