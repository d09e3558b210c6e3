"""Random sequences of plans as a scheduler would make them, and what the device needs of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS, MAX_TOP_LOGPROBS, PAGE_SIZE
from gpu_runner.device.buffers import pack
from gpu_runner.device.sampling_path import SamplingPaths
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.schedule.plan import Int32, StartRows, StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STATE_TENSORS = (
    *("page_table", "last_token", "kv_len", "done", "temperature", "top_k", "top_p", "min_p", "seed", "limit"),
    *("min_tokens_until", "stop_ids", "prompt_len", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logprobs", "constrained", "num_bias", "bias_ids", "bias_values"),
)


def int32(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def start_rows(generator: np.random.Generator, slots: list[int], limits: list[int], vocab: int) -> StartRows:
    """Random parameters that make every row greedy and end now and then."""
    count = len(slots)
    stop_ids = np.full((count, MAX_STOP_IDS), -1, dtype=np.int32)
    stop_ids[:, :2] = generator.integers(-1, vocab, (count, 2))
    stop_ids[:, -1] = generator.integers(-1, vocab, count)
    num_bias = np.minimum(generator.integers(-5, 12, count).clip(0), vocab).astype(np.int32)
    return StartRows(
        slot=int32(*slots),
        temperature=generator.uniform(0, 1e-6, count).astype(np.float32),
        top_k=generator.integers(0, 50, count).astype(np.int32),
        top_p=generator.uniform(0.1, 1, count).astype(np.float32),
        min_p=generator.uniform(0, 0.5, count).astype(np.float32),
        seed=generator.integers(-(2**63), 2**63 - 1, count),
        limit=int32(*limits),
        min_tokens_until=int32(*(limit - 4 for limit in limits)),
        stop_ids=stop_ids,
        prompt_len=generator.integers(1, 100, count).astype(np.int32),
        presence_penalty=generator.uniform(-2, 2, count).astype(np.float32),
        frequency_penalty=generator.uniform(-2, 2, count).astype(np.float32),
        repetition_penalty=generator.uniform(0.5, 2, count).astype(np.float32),
        logprobs=generator.integers(-1, MAX_TOP_LOGPROBS + 1, count).astype(np.int32),
        constrained=generator.integers(0, 2, count).astype(np.int32),
        num_bias=num_bias,
        bias_ids=np.concatenate([int32(), *(generator.permutation(vocab)[:size] for size in num_bias)], dtype=np.int32),
        bias_values=generator.uniform(-100, 100, num_bias.sum()).astype(np.float32),
    )


def uploaded(plan: StepPlan, *, num_slots: int, pages_per_seq: int) -> Tensor:
    """The packed plan on the device, [words] int32, -7 where nothing was packed."""
    size = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=plan.num_tokens)
    buffer = np.full(size, -7, dtype=np.int32)
    pack(plan, SamplingPaths(num_slots).choose(plan), buffer=buffer)
    return torch.from_numpy(buffer).to(DEVICE)


def poisoned_state(num_slots: int, pages_per_seq: int) -> DeviceState:
    """A state in which every slot was used before."""
    state = DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=DEVICE)
    state.done.fill_(True)
    for name in STATE_TENSORS:
        if name != "done":
            getattr(state, name).fill_(7)
    return state


@dataclass
class PlanMaker:
    """Starts, resumes, chunked prefills, decode rows and, for one step after a row ended, overshoot rows."""

    num_slots: int
    pages_per_seq: int
    vocab: int
    generator: np.random.Generator
    step: int = 0
    position: dict[int, int] = field(default_factory=dict)  # by running slot
    prompt_left: dict[int, int] = field(default_factory=dict)
    pages: dict[int, int] = field(default_factory=dict)  # table cells written
    ended: set[int] = field(default_factory=set)
    next_page: int = 1

    def next_plan(self, done: set[int], *, most_starts: int = 3) -> StepPlan:
        """done: the slots that have ended on the device. A host learns of it late: they stay in this one plan."""
        for slot in self.ended:
            for book in (self.position, self.prompt_left, self.pages):
                del book[slot]
        self.ended = {slot for slot in done if slot in self.position}
        decode = [slot for slot in self.position if not self.prompt_left[slot]]
        continued = [slot for slot in self.position if self.prompt_left[slot] and self.generator.random() < 0.7]
        free = [slot for slot in range(self.num_slots) if slot not in self.position]
        self.generator.shuffle(free)
        started = free[: self.generator.integers(0, most_starts + 1)]
        limits = []
        for slot in started:
            prompt = int(self.generator.integers(1, 40))
            self.position[slot] = PAGE_SIZE * int(self.generator.integers(0, 3))  # a prefix that is in the cache
            self.prompt_left[slot] = prompt
            self.pages[slot] = 0
            room = self.pages_per_seq * PAGE_SIZE - self.position[slot] - prompt
            limits.append(self.position[slot] + prompt + int(self.generator.integers(1, room + 1)))
        prefill = [*continued, *started]
        chunks = [min(int(self.generator.integers(1, 30)), self.prompt_left[slot]) for slot in prefill]
        rows = [*decode, *prefill]
        lengths = [1] * len(decode) + chunks
        begins = [self.position[slot] for slot in rows]
        cells = []
        for slot, length in zip(rows, lengths, strict=True):
            self.position[slot] += length
            self.prompt_left[slot] = max(0, self.prompt_left[slot] - length)
            while self.pages[slot] < min(-(-self.position[slot] // PAGE_SIZE), self.pages_per_seq):
                cells.append((slot, self.pages[slot], self.next_page))
                self.pages[slot] += 1
                self.next_page += 1
        self.step += 1
        table = np.array(cells, dtype=np.int32).reshape(-1, 3)
        return StepPlan(
            step=self.step,
            bucket=sum(lengths),
            num_decode_rows=len(decode),
            row_slot=int32(*rows),
            row_gen=int32(*[0] * len(rows)),
            row_start=int32(*begins),
            row_len=int32(*lengths),
            row_samples=np.array([not self.prompt_left[slot] for slot in rows], dtype=np.bool_),
            prefill_tokens=self.generator.integers(0, self.vocab, sum(chunks)).astype(np.int32),
            page_slot=table[:, 0].copy(),
            page_index=table[:, 1].copy(),
            page_id=table[:, 2].copy(),
            start=start_rows(self.generator, started, limits, self.vocab),
        )
