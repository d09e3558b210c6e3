"""Layers of a model's shape in steps of every size, as captured graphs run them, against the reference in float32.

Whatever a step is to write holds NaN before, and so does all memory that its graph takes for what layers pass on; pages
that no row owns and places behind a row's last key hold NaN throughout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support.poisoned_graphs import Calls, PoisonedGraphs
from support.ragged_rows import RaggedBatch, RaggedRows, RaggedStep, batch_of
from support.reference_logits import widened
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from asyncengine.config import PAGE_SIZE
from gpu_runner.device.graph_step import GraphStep, Phase, Uncaptured
from gpu_runner.device.host import usable_cores
from gpu_runner.kernels import reference
from gpu_runner.kernels.cuda_ops import CudaMeta, CudaOps
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.kernel_cache import use_writable_cache
from gpu_runner.kernels.kernel_compiler import KernelCompiler
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.kernels.upload_layout import pack, upload_words
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder, DecoderWeights
from gpu_runner.models.weights import empty_weights

META = torch.device("meta")
SHARPNESS = 1.5
"""Of queries: how far scores deviate from 0. Then a few keys have most of the weight, and attention's outputs are about
as large as values; with less they would drown among a residual's other parts."""
GATHERED_BYTES = 256 << 20
"""Of keys, by the reference at a time."""


def random_layers(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Always the same: products deviate from 0 as their inputs do, and no two gains or biases are alike."""
    weights = empty_weights(config, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)

    def fill(tensor: Tensor, centre: float, deviation: float) -> None:
        tensor.normal_(centre, deviation, generator=generator)

    fill(weights.embedding, 0.0, 0.5)
    for layer in weights.layers:
        for name in layer.__slots__:
            tensor = getattr(layer, name)
            if tensor is None:
                continue
            if name.endswith("norm"):
                fill(tensor, 1.0, 0.2)
            elif name.endswith("bias"):
                fill(tensor, 0.0, 0.3)
            else:
                fill(tensor, 0.0, tensor.shape[1] ** -0.5)
        queries = layer.qkv[: config.num_heads * config.head_dim] if layer.q_norm is None else layer.q_norm
        queries *= SHARPNESS
    return weights


class TappedDecoder(Decoder):
    """Keeps what its last step computed, and what it went by."""

    residual: Tensor | None = None
    meta: CudaMeta | None = None

    def forward(self, token_ids: Tensor, meta: Any, kv_cache: Tensor, *, residual: Tensor | None = None) -> Tensor:
        last = super().forward(token_ids, meta, kv_cache, residual=residual)
        self.residual, self.meta = last, meta
        return last

    def poison(self) -> None:
        """What a graph's kernels, if they are to be replayed, will write."""
        if self.residual is not None:
            self.residual.fill_(torch.nan)
        if self.meta is not None:
            for lists in self.meta.work.values():
                lists.partial_out.fill_(torch.nan)
                lists.partial_lse.fill_(torch.nan)


class LayerSteps:
    """The steps of one model's layers."""

    def __init__(
        self,
        config: ModelConfig,
        rows: RaggedRows,
        make_ops: Callable[[torch.device], CudaOps],
        *,
        device: torch.device,
        dtype: torch.dtype,
        invariant: bool = False,
    ) -> None:
        """make_ops: the kernels under test, on a device; called for "meta" too, where there is something to compile.
        invariant: as of `GraphStep`."""
        self._config, self._rows, self._device, self._dtype = config, rows, device, dtype
        self._invariant = invariant
        self._graph = PoisonedGraphs() if device.type == "cuda" else Calls()
        if device.type == "cuda":
            self._compile(make_ops(META))
        self._ops = make_ops(device)
        weights = random_layers(config, device=device, dtype=dtype)
        self._reference = Decoder(config, widened(weights), ReferenceOps())
        self._decoder = TappedDecoder(config, weights, self._ops)
        self._table = rows.page_table()
        self._ids = rows.token_ids(rows.num_slots + rows.max_tokens)
        self._pristine = self._random_cache()
        self._exact_cache = self._pristine.to(torch.float32, copy=True)
        self._kv_cache = self._pristine.clone()
        self._state = self._device_state(device)
        self._state.page_table.copy_(torch.from_numpy(self._table))
        self._state.last_token.copy_(torch.from_numpy(self._ids[: rows.num_slots]))
        self._works = self._forward_works(self._decoder, self._kv_cache, self._state)

    @property
    def has_long(self) -> bool:
        """Whether there are steps that count as long."""
        return any(phase == "long decode" for _, phase in self._works)

    @torch.inference_mode()
    def wrongs(self, step: RaggedStep, *, row_error: float, value_error: float) -> list[str]:
        """What the step leaves other than it should, in residuals, pages and scratch; the errors as of `differences`.
        One that decodes is run once more as long ones are, where its bucket has those. The next step is judged by
        itself."""
        batch = batch_of(self._rows, step, self._table, self._ids, self._device)
        kv_index = batch.meta.kv_index
        self._exact_cache[:, :, kv_index // PAGE_SIZE, :, kv_index % PAGE_SIZE] = torch.nan
        with patch.object(reference, "BLOCK_BYTES", GATHERED_BYTES), sdpa_kernel(SDPBackend.MATH):
            expected = self._reference.forward(batch.token_ids, batch.meta, self._exact_cache)
        compare = partial(differences, row_error=row_error, value_error=value_error)
        phases: tuple[Phase, ...] = ("prefill",) if step.chunks else ("decode", "long decode")
        wrongs = []
        for phase in phases:
            if phase == "long decode" and (step.bucket, phase) not in self._works:
                continue
            residual = self._run(step, batch, phase)[: step.num_tokens]
            wrongs += [
                *(f"{step}, {phase}: residuals: {wrong}" for wrong in compare(residual, expected)),
                *(f"{step}, {phase}: {wrong}" for wrong in self._wrongs_of_pages(kv_index, compare)),
                *(f"{step}, {phase}: {wrong}" for wrong in self._wrongs_of_scratch()),
            ]
        return wrongs

    def _run(self, step: RaggedStep, batch: RaggedBatch, phase: Phase) -> Tensor:
        """The residuals, [bucket, hidden]."""
        engine, work = self._works[step.bucket, phase]
        inputs = engine._inputs
        inputs.zero_()
        with self._graph.made(work) as graph:  # with inputs of no rows
            buffer = np.zeros(len(inputs), np.int32)
            pack(batch.upload, buffer)
            inputs.copy_(torch.from_numpy(buffer))
            self._state.kv_len.copy_(torch.from_numpy(self._rows.contexts))
            self._kv_cache.copy_(self._pristine)
            if self._ops._scratch is not None:
                self._ops._scratch.partials.fill_(torch.nan)
            self._decoder.poison()
            graph.replay()
            assert self._decoder.residual is not None
            return self._decoder.residual.clone()

    def _wrongs_of_pages(self, kv_index: Tensor, compare: Callable[[Tensor, Tensor], list[str]]) -> Iterator[str]:
        """Those of the step's tokens are to be written, and none else."""
        cache, page, place = self._kv_cache, kv_index // PAGE_SIZE, kv_index % PAGE_SIZE
        for layer in range(self._config.num_layers):
            for plane, what in enumerate(("keys", "values")):
                actual, expected = (both[layer, plane][page, :, place] for both in (cache, self._exact_cache))
                for wrong in compare(actual.flatten(1), expected.flatten(1)):
                    yield f"{what} of layer {layer}: {wrong}"
        cache[:, :, page, :, place] = torch.nan
        bits = {2: torch.int16, 4: torch.int32}[cache.element_size()]
        if not torch.equal(cache[:, :, 1:].view(bits), self._pristine[:, :, 1:].view(bits)):
            yield "keys or values of other tokens are written"

    def _wrongs_of_scratch(self) -> Iterator[str]:
        scratch, meta = self._ops._scratch, self._decoder.meta
        assert meta is not None
        counters = {f"attention, window {window}": lists.arrived for window, lists in meta.work.items()}
        if scratch is not None:
            counters["linear layers"] = scratch.arrivals
        for name, arrivals in counters.items():
            if arrivals.any():
                yield f"arrivals of {name} are left: {int(arrivals.count_nonzero())} of them"
            arrivals.zero_()

    def _random_cache(self) -> Tensor:
        """[layers, 2, pages, kv_heads, PAGE_SIZE, head_dim]: keys and values of the contexts, else NaN."""
        config, rows = self._config, self._rows
        shape = (config.num_layers, 2, rows.num_pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        cache = torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(1)
        contexts = rows.contexts
        slot = np.repeat(np.arange(rows.num_slots), contexts)
        position = np.concatenate([np.arange(context) for context in contexts])
        page = torch.from_numpy(self._table[slot, position // PAGE_SIZE].astype(np.int64)).to(self._device)
        place = torch.from_numpy(position % PAGE_SIZE).to(self._device)
        for layer in cache:
            for plane in layer:
                own = torch.empty(len(slot), *shape[3:4], shape[5], dtype=self._dtype, device=self._device)
                plane[page, :, place] = own.normal_(generator=generator)
        return cache

    def _device_state(self, device: torch.device) -> DeviceState:
        num_slots, pages_per_seq = self._rows.page_table().shape
        return DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=device)

    def _forward_works(
        self, decoder: Decoder, kv_cache: Tensor, state: DeviceState
    ) -> dict[tuple[int, Phase], tuple[GraphStep, Callable[[], None]]]:
        """By bucket and phase; of odd sizes those of engines that have no larger steps."""
        works: dict[tuple[int, Phase], tuple[GraphStep, Callable[[], None]]] = {}
        for max_tokens in (*self._rows.odd_sizes, self._rows.max_tokens):
            engine = self._graph_step(decoder, kv_cache, state, max_tokens)
            for kind in engine.works():
                for work, keep in kind:
                    keep(Uncaptured(work))
            works |= {key: (engine, graph.replay) for key, graph in engine._forward_graphs.items()}
        return works

    def _graph_step(self, decoder: Decoder, kv_cache: Tensor, state: DeviceState, max_tokens: int) -> GraphStep:
        num_slots, pages_per_seq = state.page_table.shape
        return GraphStep(
            decoder=decoder,
            model=self._config,
            kv_cache=kv_cache,
            state=state,
            max_rows=self._rows.max_rows_of(max_tokens),
            max_step_tokens=max_tokens,
            upload_words=upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=max_tokens),
            dtype=self._dtype,
            invariant=self._invariant,
        )

    def _compile(self, ops: CudaOps) -> None:
        """Every kernel of the steps."""

        def rehearse() -> None:
            weights = empty_weights(self._config, device=META, dtype=self._dtype)
            shape = (self._config.num_layers, 2, self._rows.num_pages, self._config.num_kv_heads, PAGE_SIZE)
            cache = torch.empty(*shape, self._config.head_dim, dtype=self._dtype, device=META)
            decoder, state = Decoder(self._config, weights, ops), self._device_state(META)
            for _, work in self._forward_works(decoder, cache, state).values():
                work()

        compile_first(rehearse)


def compile_first(rehearse: Callable[[], None]) -> None:
    """In threads that share the cores with those of other processes' tests. rehearse: calls every launch there will be,
    on tensors of the device "meta"."""
    use_writable_cache()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with KernelCompiler(rehearse, threads=max(2, usable_cores() // workers)) as compiler:
        compiler.wait(lambda done, total: None)


def differences(actual: Tensor, expected: Tensor, *, row_error: float, value_error: float) -> list[str]:
    """At most one. [T, N] each. NaN is one.

    row_error: of a token, by its norm. value_error: of the worst of its numbers, by the root of the mean square of all.
    """
    error = (actual.float() - expected).abs()
    size = expected.square().mean(dim=1).sqrt()
    by_row = error.square().mean(dim=1).sqrt() / size
    by_value = error.amax(dim=1) / size
    wrong = ~((by_row <= row_error) & (by_value <= value_error))
    if not wrong.any():
        return []
    return [
        f"{int(wrong.sum())} of {len(wrong)} tokens, first {int(wrong.nonzero()[0])}: errors up to "
        f"{float(by_row.max()):.5f} of a token and {float(by_value.max()):.5f} of a value"
    ]
