"""What is checked on a GPU of every model's shape, layers and head; tiny shapes take the same way elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.layer_shapes import SHAPES, layers_of
from support.layer_steps import META, LayerSteps, compile_first, differences
from support.ragged_rows import RaggedRows
from torch import Tensor

from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.head import HeadSampler
from gpu_runner.kernels.head_config import HeadConfig
from gpu_runner.kernels.invariant_cuda_ops import InvariantCudaOps
from gpu_runner.kernels.step_meta import new_step_meta
from gpu_runner.models.weights import linear_shapes
from gpu_runner.schedule.buckets import token_buckets

CUDA = torch.device("cuda", 0)
ROWS = RaggedRows(
    max_rows=512,
    max_tokens=2048,
    odd_sizes=(72, 100, 352, 383, 511, 767, 1023),
    vocab_size=4096,
    decode_contexts=(4990, 0, 15, 16, 17, 1300, 700, 63, 64, 511, 512, 513),
    prefill_contexts=(0, 4500, 37, 0, 1, 640, 16, 15, 300, 0, 2, 5),
    other_contexts=200,
)
ROW_ERROR, VALUE_ERROR = 2e-2, 0.1
"""In plain torch, roundings to bfloat16 come to 0.010 of a usual token, and of the worst of 512 to 0.014 and to 0.052
of a value. Where 32 of 4096 outputs are not written, 0.08 of a token or more is lost."""
LOGIT_ERROR = 1e-3
"""Of logits whose deviation is 1: what float32 sums of another order come to is a hundredth of it."""


def check_layers(name: str, *, invariant: bool = False) -> None:
    config = layers_of(SHAPES[name], vocab_size=ROWS.vocab_size)

    def ops(device: torch.device) -> CudaOps:
        if invariant:
            return InvariantCudaOps()
        return CudaOps.for_weights(linear_shapes(config), max_tokens=ROWS.max_tokens, device=device)

    layers = LayerSteps(config, ROWS, ops, device=CUDA, dtype=torch.bfloat16, invariant=invariant)
    wrongs = [
        wrong for step in ROWS.steps() for wrong in layers.wrongs(step, row_error=ROW_ERROR, value_error=VALUE_ERROR)
    ]
    assert not wrongs, "\n".join(wrongs)


HeadChoice = Callable[[int, int, int, torch.dtype], HeadConfig | None]


class HeadCheck:
    """Logits, and the best of them where a kernel chooses it without writing them, for every bucket of rows."""

    def __init__(
        self, vocab: int, hidden: int, *, max_rows: int, device: torch.device, dtype: torch.dtype, choose: HeadChoice
    ) -> None:
        self._choose, self._max_rows = choose, max_rows
        self._generator = torch.Generator(device).manual_seed(0)
        self._shape, self._dtype = (vocab, hidden), dtype
        if device.type == "cuda":
            compile_first(lambda: self._launch_all(META))
        self._device = device

    @torch.inference_mode()
    def wrongs(self) -> list[str]:
        vocab, hidden = self._shape
        weight = self._normal(vocab, hidden) * hidden**-0.5
        run = self._runner(self._device, weight)
        wrongs = []
        for rows in token_buckets(self._max_rows):
            x = self._normal(rows, hidden)
            exact = torch.cat([x.float() @ part.float().t() for part in weight.split(16_384)], dim=1)
            samples = rows - rows // 8
            logits, chosen = run(x, samples)
            wrongs += [
                f"{rows} rows: {wrong}"
                for wrong in differences(logits, exact, row_error=LOGIT_ERROR, value_error=LOGIT_ERROR)
            ]
            if chosen is not None:
                best = exact.gather(1, chosen[:, None].long().clamp(0, vocab - 1))[:, 0]
                if (best < exact.amax(dim=1) - LOGIT_ERROR)[:samples].any() or chosen[samples:].any():
                    wrongs.append(f"{rows} rows: not the best of them are chosen")
        return wrongs

    def _launch_all(self, device: torch.device) -> None:
        vocab, hidden = self._shape
        run = self._runner(device, torch.empty(vocab, hidden, dtype=self._dtype, device=device))
        for rows in token_buckets(self._max_rows):
            run(torch.empty(rows, hidden, dtype=self._dtype, device=device), rows)

    def _runner(self, device: torch.device, weight: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor | None]]:
        """Of x and the number of samples: logits, [rows, vocab], and, if so, what is chosen, [rows]."""
        ops = CudaOps.for_weights([self._shape], max_tokens=self._max_rows, device=device)
        head = HeadSampler(max_rows=self._max_rows, device=device)
        state = DeviceState(num_slots=1, pages_per_seq=1, device=device)
        meta = new_step_meta(max_rows=self._max_rows, max_tokens=self._max_rows, device=device)

        def run(x: Tensor, samples: int) -> tuple[Tensor, Tensor | None]:
            logits = ops.logits(x, weight)
            config = self._choose(len(x), len(weight), x.shape[1], x.dtype)
            if config is None:
                return logits, None
            meta.counts[3] = samples
            chosen = torch.full((len(x),), -1, dtype=torch.int32, device=device)
            head.choose(x, weight, state, meta, chosen, noise=False, config=config)
            return logits, chosen

        return run

    def _normal(self, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(generator=self._generator)
