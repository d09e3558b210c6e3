"""One step on a GPU: two CUDA graphs, chosen by the host from a plan's sizes and replayed.

    upload -> [forward graph: step_meta, work list, layers] -> [finish graph: head, sample, post_update] -> results
               by token bucket and by whether rows prefill      by variant and row bucket

All that differs between steps of one size lies in device memory at fixed addresses: the uploaded plan, the state of the
slots, the step's layout (`StepMeta`), the work lists. The graphs share one memory pool: they run one after the other on
one stream, and pass results on only through buffers allocated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from gpu_runner.device.buffers import PackedStep, Prefixes
from gpu_runner.device.sampling_path import SamplingPath
from gpu_runner.device.state import DeviceState
from gpu_runner.device.step import DecoderLike
from gpu_runner.kernels import norm_rope
from gpu_runner.kernels.cuda_ops import CudaMeta
from gpu_runner.kernels.post_update import post_update
from gpu_runner.kernels.sample import Sampler
from gpu_runner.kernels.step_meta import new_step_meta, step_meta
from gpu_runner.kernels.work_list import allocate_work_list, build_work_list
from gpu_runner.models.config import ModelConfig
from gpu_runner.schedule.buckets import bucket_for, token_buckets

Variant = Literal["none", "greedy", "sample", "filtered"]
"""none: no row samples. greedy: all rows are. sample: no row has a filter. filtered: anything, min_tokens included."""


class GraphStep:
    """Runs packed plans by replaying graphs; `capture` must come first. Does what `Step` does, kernel by kernel."""

    def __init__(
        self,
        *,
        decoder: DecoderLike,
        model: ModelConfig,
        kv_cache: Tensor,
        state: DeviceState,
        max_rows: int,
        max_step_tokens: int,
        upload_words: int,
        dtype: torch.dtype,
    ) -> None:
        """max_rows: rows of any step. kv_cache: may be replaced until `capture`."""
        device = state.done.device
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._state = state
        self._token_buckets = token_buckets(max_step_tokens)
        self._row_buckets = token_buckets(max_rows)
        self._max_rows = max_rows
        self._inputs = torch.zeros(upload_words, dtype=torch.int32, device=device)
        self._input_prefixes = Prefixes(self._inputs)
        self._meta = new_step_meta(max_rows=max_rows, max_tokens=max_step_tokens, device=device)
        self._work = {
            window: allocate_work_list(
                max_rows=max_rows,
                max_tokens=max_step_tokens,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                window=window,
                device=device,
            )
            for window in dict.fromkeys(model.layer_windows)
        }
        self._sampler = Sampler(max_rows=max_rows, vocab=model.vocab_size, device=device)
        self._sample_hidden = torch.zeros(max_rows, model.hidden_size, dtype=dtype, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._results = torch.zeros(2, len(state.done), dtype=torch.int32, device=device)
        self._forward_graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._finish_graphs: dict[tuple[Variant, int], torch.cuda.CUDAGraph] = {}

    def run(self, step: PackedStep, upload: Tensor, results: Tensor) -> None:
        """Queue the whole step on the current stream. upload: the ring slot's `Prefixes.holding(step.words)`."""
        self._input_prefixes.holding(step.words).copy_(upload, non_blocking=True)
        self._forward_graphs[step.bucket, step.num_decode_rows < step.num_tokens].replay()
        self._finish_graphs[self._finish_key(step)].replay()
        results.copy_(self._results, non_blocking=True)

    def run_largest(self) -> None:
        """The work of the largest step, uncaptured and over no rows: compiles its kernels and takes its memory."""
        self._forward(self._token_buckets[-1], prefill=True)
        self._finish("filtered", self._max_rows)

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every graph on the current stream, the largest first. progress: graphs done, and in all."""
        works: list[tuple[Callable[[], None], Callable[[torch.cuda.CUDAGraph], None]]] = []
        for prefill in (True, False):
            for bucket in reversed(self._token_buckets):
                if prefill or bucket <= bucket_for(self._token_buckets, self._max_rows):
                    works.append(self._forward_work(bucket, prefill))
        variants: tuple[Variant, ...] = ("filtered", "sample", "greedy")
        for variant in variants:
            works.extend(self._finish_work(variant, rows) for rows in reversed(self._row_buckets))
        works.append(self._finish_work("none", 0))
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for done, (work, keep) in enumerate(works):
            work()  # compiles what has not been, outside the capture
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
            keep(graph)
            progress(done + 1, len(works))

    def _forward_work(
        self, bucket: int, prefill: bool
    ) -> tuple[Callable[[], None], Callable[[torch.cuda.CUDAGraph], None]]:
        return (
            lambda: self._forward(bucket, prefill=prefill),
            lambda graph: self._forward_graphs.__setitem__((bucket, prefill), graph),
        )

    def _finish_work(
        self, variant: Variant, rows: int
    ) -> tuple[Callable[[], None], Callable[[torch.cuda.CUDAGraph], None]]:
        return (
            lambda: self._finish(variant, rows),
            lambda graph: self._finish_graphs.__setitem__((variant, rows), graph),
        )

    def _forward(self, num_tokens: int, *, prefill: bool) -> None:
        """From the upload to the last residual of each row that samples."""
        meta = self._meta
        step_meta(self._inputs, self._state, meta, num_tokens=num_tokens)
        for work in self._work.values():
            build_work_list(
                work,
                counts=meta.counts,
                row_slot=meta.row_slot,
                row_start=meta.row_start,
                row_len=meta.row_len,
                row_token=meta.row_token,
                page_table=self._state.page_table,
                prefill=prefill,
            )
        layers = CudaMeta(step=meta, work=self._work, page_table=self._state.page_table, prefill=prefill)
        residual = self._decoder.forward(meta.token_ids[:num_tokens], layers, self.kv_cache)
        samples = min(num_tokens, self._max_rows)
        norm_rope.embedding(meta.sample_token[:samples], residual, out=self._sample_hidden[:samples])

    def _finish(self, variant: Variant, rows: int) -> None:
        """From those residuals to the results."""
        sampled = self._sampled[:rows]
        if variant != "none":
            logits = self._decoder.logits(self._sample_hidden[:rows])
            if variant == "greedy":
                self._sampler.greedy(logits, self._state, self._meta, sampled, bans_stop_ids=False)
            else:
                filtered = variant == "filtered"
                self._sampler.sample(
                    logits, self._state, self._meta, sampled, filtered=filtered, bans_stop_ids=filtered
                )
        post_update(sampled, self._state, self._meta, self._results.view(-1))

    def _finish_key(self, step: PackedStep) -> tuple[Variant, int]:
        if not step.num_samples:
            return "none", 0
        return _variant(step.path), bucket_for(self._row_buckets, step.num_samples)


def _variant(path: SamplingPath) -> Variant:
    if path.filtered or path.bans_stop_ids:
        return "filtered"
    return "greedy" if path.greedy else "sample"
