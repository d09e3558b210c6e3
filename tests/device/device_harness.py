"""A tiny real decoder, an executor round it, and plans built by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE
from asyncengine.wire.reports import RunnerInfo
from gpu_runner.device.buffers import pages_for
from gpu_runner.device.executor import Executor
from gpu_runner.device.memory import allocate_kv_cache
from gpu_runner.device.step import Step
from gpu_runner.device.stream import Stream
from gpu_runner.device.target import make_stream
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.config import ModelConfig, RopeConfig
from gpu_runner.models.decoder import Decoder, DecoderWeights, LayerWeights
from gpu_runner.schedule.buckets import bucket_for, token_buckets
from gpu_runner.schedule.plan import StartRows, StepPlan, StepResult

VOCAB = 97
NEVER = 2**30
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(base=10_000.0),
    layer_windows=(None, None),
    max_position=256,
    eos_ids=(1,),
    source="a test",
)


def tiny_decoder(device: torch.device) -> Decoder:
    generator = torch.Generator().manual_seed(11)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.4).to(device)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=1 + rand(32),
            qkv=rand(64, 32),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=rand(32, 32),
            o_bias=None,
            post_attention_norm=1 + rand(32),
            gate_up=rand(96, 32),
            gate_up_bias=None,
            down=rand(32, 48),
            down_bias=None,
        )

    embedding = rand(VOCAB, 32)
    return Decoder(
        CONFIG,
        DecoderWeights(
            embedding=embedding, layers=(layer(), layer()), final_norm=1 + rand(32), lm_head=rand(VOCAB, 32)
        ),
        ReferenceOps(),
    )


@torch.inference_mode()
def naive_greedy(decoder: Decoder, prompt: Sequence[int], count: int, device: torch.device) -> list[int]:
    """Recompute everything for each new token: no paging, no batch, no state."""
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        pages = -(-length // PAGE_SIZE)
        meta = BatchMeta(
            num_decode_rows=0,
            row_start=np.zeros(1, np.int32),
            row_len=np.full(1, length, np.int32),
            row_slot=torch.zeros(1, dtype=torch.int64, device=device),
            positions=torch.arange(length, device=device),
            kv_index=torch.arange(length, device=device),
            page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
        )
        cache = allocate_kv_cache(decoder.config, pages, torch.float32, device)
        hidden = decoder.forward(torch.tensor(tokens, device=device), meta, cache)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


@dataclass
class Row:
    """Parameters with which a slot starts."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    limit: int = NEVER
    min_tokens_until: int = 0
    stop_ids: tuple[int, ...] = ()
    prompt_len: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1
    constrained: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass
class Prefill:
    slot: int
    start: int
    tokens: Sequence[int]
    samples: bool = True


@dataclass
class Rig:
    """An executor and the numbering of its steps."""

    executor: Executor
    kv_cache: torch.Tensor
    decoder: Any
    device: torch.device
    step: int = field(default=0)

    def plan(
        self,
        *,
        decode: Sequence[tuple[int, int]] = (),
        prefill: Sequence[Prefill] = (),
        start: dict[int, Row] | None = None,
        pages: Iterable[tuple[int, int, int]] = (),
    ) -> StepPlan:
        """decode: (slot, position) pairs. pages: (slot, page index, page id)."""
        self.step += 1
        start = start or {}
        rows = list(start.values())
        cells = np.array(list(pages), dtype=np.int32).reshape(-1, 3)
        tokens = [token for row in prefill for token in row.tokens]
        return StepPlan(
            step=self.step,
            bucket=bucket_for(token_buckets(512), len(decode) + len(tokens)),
            num_decode_rows=len(decode),
            row_slot=np.array([slot for slot, _ in decode] + [row.slot for row in prefill], dtype=np.int32),
            row_gen=np.zeros(len(decode) + len(prefill), dtype=np.int32),
            row_start=np.array([position for _, position in decode] + [row.start for row in prefill], dtype=np.int32),
            row_len=np.array([1] * len(decode) + [len(row.tokens) for row in prefill], dtype=np.int32),
            row_samples=np.array([True] * len(decode) + [row.samples for row in prefill], dtype=np.bool_),
            prefill_tokens=np.array(tokens, dtype=np.int32),
            page_slot=cells[:, 0].copy(),
            page_index=cells[:, 1].copy(),
            page_id=cells[:, 2].copy(),
            start=StartRows(
                slot=np.array(list(start), dtype=np.int32),
                temperature=np.array([row.temperature for row in rows], dtype=np.float32),
                top_k=np.array([row.top_k for row in rows], dtype=np.int32),
                top_p=np.array([row.top_p for row in rows], dtype=np.float32),
                min_p=np.array([row.min_p for row in rows], dtype=np.float32),
                seed=np.array([row.seed for row in rows], dtype=np.int64),
                limit=np.array([row.limit for row in rows], dtype=np.int32),
                min_tokens_until=np.array([row.min_tokens_until for row in rows], dtype=np.int32),
                stop_ids=np.array(
                    [[*row.stop_ids, *[-1] * (MAX_STOP_IDS - len(row.stop_ids))] for row in rows], dtype=np.int32
                ).reshape(-1, MAX_STOP_IDS),
                prompt_len=np.array([row.prompt_len for row in rows], dtype=np.int32),
                presence_penalty=np.array([row.presence_penalty for row in rows], dtype=np.float32),
                frequency_penalty=np.array([row.frequency_penalty for row in rows], dtype=np.float32),
                repetition_penalty=np.array([row.repetition_penalty for row in rows], dtype=np.float32),
                logprobs=np.array([row.logprobs for row in rows], dtype=np.int32),
                constrained=np.array([row.constrained for row in rows], dtype=np.int32),
                num_bias=np.array([len(row.logit_bias) for row in rows], dtype=np.int32),
                bias_ids=np.array([token for row in rows for token in row.logit_bias], dtype=np.int32),
                bias_values=np.array([b for row in rows for b in row.logit_bias.values()], dtype=np.float32),
            ),
        )

    def run(self, plan: StepPlan) -> StepResult:
        self.executor.launch(plan)
        return self.executor.collect()

    def decode_pipelined(self, slots: dict[int, int], count: int) -> dict[int, list[int]]:
        """Decode `count` steps of slots at these positions, always two steps in flight. Returns tokens by slot."""
        produced: dict[int, list[int]] = {slot: [] for slot in slots}
        for index in range(count):
            self.executor.launch(self.plan(decode=[(slot, first + index) for slot, first in slots.items()]))
            if index:
                self._collect(slots, produced)
        if count:
            self._collect(slots, produced)
        return produced

    def generate(
        self, prompt: Sequence[int], count: int, *, row: Row, slot: int = 0, first_page: int = 1, chunk: int = 1000
    ) -> list[int]:
        """Alone in the batch, with as many pages from `first_page` as it takes."""
        num_pages = -(-(len(prompt) + count) // PAGE_SIZE)
        starting: dict[str, Any] = {
            "start": {slot: row},
            "pages": [(slot, index, first_page + index) for index in range(num_pages)],
        }
        for begin in range(0, len(prompt), chunk):
            part = prompt[begin : begin + chunk]
            last = begin + chunk >= len(prompt)
            result = self.run(self.plan(prefill=[Prefill(slot, begin, part, samples=last)], **starting))
            starting = {}
        first = int(result.tokens[0])
        return [first, *self.decode_pipelined({slot: len(prompt)}, count - 1)[slot]]

    def pages_snapshot(self) -> torch.Tensor:
        """Everything but the dummy page."""
        return self.kv_cache[:, :, 1:].clone()

    def _collect(self, slots: dict[int, int], produced: dict[int, list[int]]) -> None:
        result = self.executor.collect()
        for slot, token in zip(slots, result.tokens.tolist(), strict=True):
            produced[slot].append(token)


def make_rig(
    device: torch.device,
    *,
    decoder: Any = None,
    num_slots: int = 8,
    num_pages: int = 64,
    max_model_len: int = 128,
    stream: Stream | None = None,
) -> Rig:
    decoder = decoder or tiny_decoder(device)
    kv_cache = allocate_kv_cache(CONFIG, num_pages, torch.float32, device)
    info = RunnerInfo(
        device=device.type,
        dtype="float32",
        architecture=CONFIG.architecture,
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        num_pages=num_pages,
        weight_bytes=0,
        kv_cache_bytes=kv_cache.nbytes,
    )
    pages_per_seq = pages_for(max_model_len)
    words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=512)
    step = Step(
        decoder=decoder,
        kv_cache=kv_cache,
        state=DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=device),
        max_step_tokens=512,
        upload_words=words,
    )
    executor = Executor(
        step=step,
        model_config=CONFIG,
        stream=stream or make_stream(device),
        info=info,
        num_slots=num_slots,
        pages_per_seq=pages_per_seq,
        max_step_tokens=512,
        pinned=device.type == "cuda",
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Rig(executor=executor, kv_cache=kv_cache, decoder=decoder, device=device)
