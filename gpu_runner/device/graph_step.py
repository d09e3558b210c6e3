"""One step on a GPU: CUDA graphs, chosen by the host from a plan's sizes and replayed. One or two make a step:

    decode graph, by variant, token bucket and phase    step_meta, layers, head, sample, post_update

    forward graph, by token bucket and phase            fetch, step_meta, layers
    score graph, by row bucket                          head, log-probabilities of prompts, deliver
    finish graph, by variant and row bucket             head, sample, post_update, deliver

The first is for steps whose rows all decode and need nothing special: the host launches once, and there is no gap
between two graphs. Where the plan is small, `step_meta` fetches it; where results are but tokens, `post_update`
delivers them. The phase is whether rows prefill and, where other kernels attend to long contexts (`decode_way`),
whether those of a step that only decodes are long.

All that differs between steps of one size lies in device memory at fixed addresses: the uploaded plan, the state of
the slots, the step's layout (`StepMeta`), the work lists. The score graph is replayed between the two by steps that
score tokens of prompts. The graphs share one memory pool: they run one after the other on one stream, and pass
results on only through buffers allocated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.device.buffers import RING_DEPTH, PackedStep, RingSlot
from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.kernels import norm_rope
from gpu_runner.kernels.attention_fused import can_fuse
from gpu_runner.kernels.cuda_ops import CudaMeta
from gpu_runner.kernels.decode_way import choose_decode
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.head import HeadSampler
from gpu_runner.kernels.head_config import choose_head
from gpu_runner.kernels.host_ring import HostRing, deliver, deliver_scores, fetch
from gpu_runner.kernels.post_update import post_update, post_update_to_host
from gpu_runner.kernels.reference_page_copy import PageMemory
from gpu_runner.kernels.result_layout import Results, Scores, result_words, score_words
from gpu_runner.kernels.sample import Sampler
from gpu_runner.kernels.sample_full import ONE_PART_TILING, TILING, FullSampling
from gpu_runner.kernels.score_prompt import PromptScorer
from gpu_runner.kernels.step_meta import new_step_meta, step_meta
from gpu_runner.kernels.work_list import allocate_work_list, build_work_list
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder
from gpu_runner.schedule.buckets import bucket_for, token_buckets
from gpu_runner.schedule.plan import StepPlan

Variant = Literal["none", "greedy", "sample", "filtered", "full"]
"""none: no row samples. greedy: all rows are. sample: no row has a filter. filtered: any way to choose a token,
min_tokens included. full: that, with penalties, logit bias, masks and log-probabilities."""
DECODE_VARIANTS: tuple[Variant, ...] = ("sample", "greedy")
Phase = Literal["prefill", "decode", "long decode"]
"""prefill: some rows may. Else all rows decode; long decode: with contexts that are long together."""


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """Stands in for a graph: queues its kernels anew each time."""

    replay: Callable[[], None]


Graph = torch.cuda.CUDAGraph | Uncaptured
Work = tuple[Callable[[], None], Callable[[Graph], None]]


class GraphStep:
    """Runs packed plans by replaying graphs; `capture` must come first. Does what `Step` does, kernel by kernel."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        model: ModelConfig,
        kv_cache: Tensor,
        state: DeviceState,
        max_rows: int,
        max_step_tokens: int,
        upload_words: int,
        dtype: torch.dtype,
        graphs: bool = True,
        invariant: bool = False,
    ) -> None:
        """max_rows: rows of any step. kv_cache: may be replaced until `capture`. graphs: off to check that results do
        not depend on them. invariant: a row's results must not depend on others, bit for bit; the decoder runs on
        `InvariantCudaOps`."""
        device = state.done.device
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._graphs = graphs
        self._fuses_head = not invariant  # whose sums are others than those of logits in memory
        self._fuses_attention = not invariant and can_fuse(kv_cache, model.num_heads)
        self._state = state
        self._token_buckets = token_buckets(max_step_tokens)
        self._row_buckets = token_buckets(max_rows)
        self._max_rows = max_rows
        buckets = self._token_buckets[::-1]
        largest = bucket_for(self._token_buckets, max_rows)
        self._buckets: dict[Phase, Sequence[int]] = {
            "prefill": buckets,
            "decode": [bucket for bucket in buckets if bucket <= largest],
        }
        self._long_from = self._find_long(model, dtype)
        if self._long_from:
            self._buckets["long decode"] = list(self._long_from)
        self._inputs = torch.zeros(upload_words, dtype=torch.int32, device=device)
        self._host_ring = HostRing.allocate(RING_DEPTH, device)
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
                all_rows=invariant,
            )
            for window in dict.fromkeys(model.layer_windows)
        }
        self._sampler = Sampler(max_rows=max_rows, vocab=model.vocab_size, device=device)
        self._head = HeadSampler(max_rows=max_rows, device=device)
        self._vocab = model.vocab_size
        self._sample_hidden = torch.zeros(max_rows, model.hidden_size, dtype=dtype, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._full = FullSampling(
            max_rows=max_rows,
            vocab=model.vocab_size,
            device=device,
            tiling=ONE_PART_TILING if invariant else TILING,
        )
        self._results = torch.zeros(result_words(len(state.done)), dtype=torch.int32, device=device)
        self._parts = Results.of(self._results)
        # of steps that prefill, for the score graph to find some of its rows
        self._residual = torch.zeros(max_step_tokens, model.hidden_size, dtype=dtype, device=device)
        self._score_hidden = torch.zeros(max_rows, model.hidden_size, dtype=dtype, device=device)
        self._scorer = PromptScorer(self._full, state, max_rows=max_rows)
        self._scores = torch.zeros(score_words(len(state.done)), dtype=torch.int32, device=device)
        self._score_graphs: dict[int, Graph] = {}
        self._forward_graphs: dict[tuple[int, Phase], Graph] = {}
        self._finish_graphs: dict[tuple[Variant, int], Graph] = {}
        self._decode_graphs: dict[tuple[Variant, int, Phase], Graph] = {}

    @property
    def kv_cache(self) -> Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        self._kv_cache = cache
        # the token id at each place of the cache
        self._page_tokens = torch.zeros(cache.shape[2], PAGE_SIZE, dtype=torch.int32, device=cache.device)

    def connect(self, ring: Sequence[RingSlot], masks: TokenMasks) -> None:
        self._host_ring.connect([(slot.upload, slot.results) for slot in ring])
        self._full.masks.connect(masks.tensor)

    def page_memory(self, host: Tensor) -> PageMemory:
        return PageMemory.of(self._kv_cache, self._page_tokens, host)

    def run(self, step: PackedStep) -> None:
        plan, phase, variant = step.plan, self._phase(step.plan), _variant(step)
        decode = self._decode_graphs.get((variant, plan.bucket, phase))
        if decode is not None and step.num_samples == plan.num_decode_rows:
            decode.replay()
            return
        self._forward_graphs[plan.bucket, phase].replay()
        if len(plan.scores):
            self._score_graphs[bucket_for(self._row_buckets, len(plan.scores))].replay()
        rows = 0 if variant == "none" else bucket_for(self._row_buckets, step.num_samples)
        self._finish_graphs[variant, rows].replay()

    def run_largest(self) -> None:
        """The work of the largest step, uncaptured and over no rows: compiles its kernels and takes its memory."""
        self._forward(self._token_buckets[-1], "prefill")
        self._finish("full", self._sample_hidden)

    def works(self) -> list[list[Work]]:
        """What becomes a graph each, by kind, the largest of a kind first: what is queued, and where its graph is kept.

        Run on tensors without memory, they tell which kernels there are.
        """
        kinds = [[self._forward_work(bucket, phase) for bucket in buckets] for phase, buckets in self._buckets.items()]
        variants: tuple[Variant, ...] = ("full", "filtered", "sample", "greedy")
        for variant in variants:
            kinds.append([self._finish_work(variant, rows) for rows in reversed(self._row_buckets)])
        for variant, (phase, buckets) in product(DECODE_VARIANTS, self._buckets.items()):
            if phase != "prefill":
                kinds.append([self._decode_work(variant, bucket, phase) for bucket in buckets])
        kinds.append([self._score_work(rows) for rows in reversed(self._row_buckets)])
        return [*kinds, [self._finish_work("none", 0)]]

    def drop_graphs(self) -> None:
        """Give up every graph, and with them what they took."""
        self._forward_graphs.clear()
        self._finish_graphs.clear()
        self._decode_graphs.clear()
        self._score_graphs.clear()

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every graph on the current stream, the largest first. progress: graphs done, and in all."""
        works = [work for kind in self.works() for work in kind]
        if not self._graphs:
            for work, keep in works:
                keep(Uncaptured(torch.inference_mode()(work)))
            return
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

    def _find_long(self, model: ModelConfig, dtype: torch.dtype) -> dict[int, int]:
        """By token bucket, the largest first: from how many tokens of context on, all rows together, a step that
        decodes is long. Buckets whose rows cannot have so many are left out, and so are all of a model with windows,
        whose layers read less than the context."""
        if any(model.layer_windows):
            return {}
        token_bytes = model.kv_bytes_per_token(dtype) // model.num_layers
        capacity = self._state.page_table.shape[1] * PAGE_SIZE
        long_from = {}
        for bucket in self._buckets["decode"]:
            long_bytes = choose_decode(bucket, prefill=False, fuses=self._fuses_attention).long_bytes
            if long_bytes is not None and long_bytes <= min(bucket, self._max_rows) * capacity * token_bytes:
                long_from[bucket] = -(-long_bytes // token_bytes)
        return long_from

    def _phase(self, plan: StepPlan) -> Phase:
        if len(plan.prefill_tokens):
            return "prefill"
        long_from = self._long_from.get(plan.bucket)
        return "decode" if long_from is None or plan.row_start.sum() < long_from else "long decode"

    def _forward_work(self, bucket: int, phase: Phase) -> Work:
        return (
            lambda: self._forward(bucket, phase),
            lambda graph: self._forward_graphs.__setitem__((bucket, phase), graph),
        )

    def _finish_work(self, variant: Variant, rows: int) -> Work:
        return (
            lambda: self._finish(variant, self._sample_hidden[:rows]),
            lambda graph: self._finish_graphs.__setitem__((variant, rows), graph),
        )

    def _score_work(self, rows: int) -> Work:
        return lambda: self._score(rows), lambda graph: self._score_graphs.__setitem__(rows, graph)

    def _decode_work(self, variant: Variant, bucket: int, phase: Phase) -> Work:
        """Of a step whose tokens are one of each row, all of which sample: the residuals are those of the samples."""
        return (
            lambda: self._finish(variant, self._layers(bucket, phase)[: self._max_rows]),
            lambda graph: self._decode_graphs.__setitem__((variant, bucket, phase), graph),
        )

    def _forward(self, num_tokens: int, phase: Phase) -> None:
        """From the upload to the last residual of each row that samples."""
        residual = self._layers(num_tokens, phase)
        samples = min(num_tokens, self._max_rows)
        tokens, out = self._meta.sample_token[:samples], self._sample_hidden[:samples]
        norm_rope.embedding(tokens, residual, out=out)

    def _layers(self, num_tokens: int, phase: Phase) -> Tensor:
        """From the upload to the last residual of each token."""
        meta, page_table = self._meta, self._state.page_table
        prefill, long = phase == "prefill", phase == "long decode"
        way = choose_decode(num_tokens, prefill=prefill, fuses=self._fuses_attention, long=long)
        lists = {window: work.recut(way.cut) for window, work in self._work.items()}
        first, *others = lists.values()
        if prefill:
            fetch(self._host_ring, self._inputs, num_tokens=num_tokens)
        step_meta(
            *(self._inputs, self._state, meta, self._page_tokens),
            num_tokens=num_tokens,
            ring=None if prefill else self._host_ring,
            work=first,
            prefill=prefill,
        )
        for work in others:
            build_work_list(
                work,
                counts=meta.counts,
                row_slot=meta.row_slot,
                row_start=meta.row_start,
                row_len=meta.row_len,
                row_token=meta.row_token,
                page_table=page_table,
                prefill=prefill,
            )
        layers = CudaMeta(step=meta, work=lists, page_table=page_table, prefill=prefill, way=way)
        residual = self._residual[:num_tokens] if prefill else None
        return self._decoder.forward(meta.token_ids[:num_tokens], layers, self.kv_cache, residual=residual)

    def _score(self, rows: int) -> None:
        """From the residuals of a step that prefills to the scores that its plan asks for, at most `rows`."""
        token, hidden = self._scorer.unpack(self._inputs, rows), self._score_hidden[:rows]
        norm_rope.embedding(token, self._residual, out=hidden)
        scores = self._scores
        self._scorer.score(self._decoder.logits(hidden), self._page_tokens, Scores.of(scores))
        deliver_scores(self._host_ring, self._inputs, scores, first_word=len(self._results))

    def _finish(self, variant: Variant, hidden: Tensor) -> None:
        """From those residuals to the results. hidden: [N, hidden], N at least the step's samples."""
        sampled = self._sampled[: len(hidden)]
        if variant != "none" and not self._choose_without_logits(variant, hidden, sampled):
            self._choose_by_logits(variant, self._decoder.logits(hidden), sampled)
        if variant == "full":
            post_update(sampled, self._state, self._meta, self._results)
            deliver(self._host_ring, self._inputs, self._results)
        else:
            post_update_to_host(
                *(sampled, self._state, self._meta, self._host_ring, self._inputs),
                num_slots=len(self._state.done),
            )

    def _choose_without_logits(self, variant: Variant, hidden: Tensor, sampled: Tensor) -> bool:
        """Whether it was done: no row needs more than its best score, and the table takes the head's shape."""
        if variant not in ("greedy", "sample") or not self._fuses_head:
            return False
        config = choose_head(len(hidden), self._vocab, hidden.shape[1], hidden.dtype)
        if config is None:
            return False
        x, weight = self._decoder.head_factors(hidden)
        self._head.choose(x, weight, self._state, self._meta, sampled, noise=variant == "sample", config=config)
        return True

    def _choose_by_logits(self, variant: Variant, logits: Tensor, sampled: Tensor) -> None:
        """Changes the logits."""
        if variant == "greedy":
            self._sampler.greedy(logits, self._state, self._meta, sampled, bans_stop_ids=False)
            return
        if variant == "full":
            self._full.before(logits, self._state, self._meta, self._page_tokens)
        filtered = variant != "sample"
        self._sampler.sample(logits, self._state, self._meta, sampled, filtered=filtered, bans_stop_ids=filtered)
        if variant == "full":
            self._full.after(logits, sampled, self._state, self._meta, self._page_tokens, self._parts)


def _variant(step: PackedStep) -> Variant:
    path = step.path
    if not step.num_samples:
        return "none"
    if path.full:
        return "full"
    if path.filtered or path.bans_stop_ids:
        return "filtered"
    return "greedy" if path.greedy else "sample"
