"""The memory that the largest step takes on a GPU, found by running it."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.config import MAX_STOP_IDS
from asyncengine.errors import StartupError
from gpu_runner.device.buffers import pack, pages_for, upload_words
from gpu_runner.device.memory import allocate_kv_cache
from gpu_runner.device.sampling_path import SamplingPaths
from gpu_runner.device.state import DeviceState
from gpu_runner.device.step import DecoderLike, Step
from gpu_runner.models.config import ModelConfig
from gpu_runner.schedule.plan import StartRows, StepPlan


def measure_step_bytes(
    decoder: DecoderLike,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_slots: int,
    max_step_tokens: int,
    max_model_len: int,
) -> int:
    """Bytes of GPU memory that a step of `max_step_tokens` takes beside weights and KV cache, at its peak.

    Raises `StartupError` when the step does not fit the memory that is free.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    plan = largest_plan(num_slots=num_slots, max_step_tokens=max_step_tokens, max_model_len=max_model_len)
    try:
        _run(plan, decoder, model, dtype, device, num_slots=num_slots, max_model_len=max_model_len)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"too little GPU memory for one step of max_num_batched_tokens {max_step_tokens} over {num_slots} rows: "
            f"{torch.cuda.mem_get_info(device)[0]:,} bytes are free beside the weights"
        ) from error
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before


def largest_plan(*, num_slots: int, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """A step of as many rows and tokens as there may be: the first rows as long as they can be, all rows sampling with
    every filter on. Its page table is empty, so that everything happens in the dummy page."""
    rows = min(num_slots, max_step_tokens)
    length = np.ones(rows, dtype=np.int32)
    spare = max_step_tokens - rows
    for row in range(rows):
        more = min(spare, max_model_len - 1)
        length[row] += more
        spare -= more
    slot = np.arange(rows, dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    return StepPlan(
        step=0,
        bucket=max_step_tokens,
        num_decode_rows=0,
        row_slot=slot,
        row_gen=np.zeros(rows, dtype=np.int32),
        row_start=max_model_len - length,
        row_len=length,
        row_samples=np.ones(rows, dtype=np.bool_),
        prefill_tokens=np.zeros(int(length.sum()), dtype=np.int32),
        page_slot=none,
        page_index=none,
        page_id=none,
        start=StartRows(
            slot=slot,
            temperature=np.ones(rows, dtype=np.float32),
            top_k=np.full(rows, 50, dtype=np.int32),
            top_p=np.full(rows, 0.9, dtype=np.float32),
            min_p=np.full(rows, 0.01, dtype=np.float32),
            seed=np.zeros(rows, dtype=np.int64),
            limit=np.full(rows, max_model_len, dtype=np.int32),
            min_tokens_until=np.full(rows, max_model_len + 1, dtype=np.int32),
            stop_ids=np.full((rows, MAX_STOP_IDS), -1, dtype=np.int32),
        ),
    )


def _run(
    plan: StepPlan,
    decoder: DecoderLike,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_slots: int,
    max_model_len: int,
) -> None:
    pages_per_seq = pages_for(max_model_len)
    words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=plan.num_tokens)
    step = Step(
        decoder=decoder,
        kv_cache=allocate_kv_cache(model, 1, dtype, device),
        state=DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=device),
        max_step_tokens=plan.num_tokens,
        upload_words=words,
    )
    upload = torch.empty(words, dtype=torch.int32)
    packed = pack(plan, SamplingPaths(num_slots).choose(plan), pages_per_seq=pages_per_seq, buffer=upload.numpy())
    step.run(packed, upload, torch.empty(2 * num_slots, dtype=torch.int32))
    torch.cuda.synchronize(device)
