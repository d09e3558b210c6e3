"""How the decode rows of a step attend: by which kernels, and in how many ranges of keys."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runner.kernels.work_list import LARGE_CUT, MULTIPROCESSORS, RangeCut


@dataclass(frozen=True, slots=True)
class DecodeWay:
    """fused_warps: of each program of `attention_fused`. None: `attention_decode`, behind a kernel that rotates."""

    cut: RangeCut
    fused_warps: int | None = None


# Up to so many tokens, from the output of `scripts/bench_kernels/attention_layer.py`. While rows are few, they are cut
# into as many programs as run at once: any more would start when these have ended, with nothing to hide how long their
# first keys take. Of the fused kernel that is one of eight warps to a multiprocessor, or two of four, which one or two
# rows with their short ranges fill as well; of `attention_decode` four.
_FUSED = (
    (2, DecodeWay(RangeCut(2 * MULTIPROCESSORS, 128), fused_warps=4)),
    (16, DecodeWay(RangeCut(MULTIPROCESSORS, 512), fused_warps=8)),
    (32, DecodeWay(RangeCut(2 * MULTIPROCESSORS, 512), fused_warps=4)),
)
# From more rows on, keys and values that stream through shared memory hide more of each other's ways than registers do.
_APART = (
    (32, DecodeWay(RangeCut(4 * MULTIPROCESSORS, 256))),
    (64, DecodeWay(RangeCut(4 * MULTIPROCESSORS, 512))),
)
_OTHERS = DecodeWay(LARGE_CUT)


def choose_decode(num_tokens: int, *, prefill: bool, fuses: bool) -> DecodeWay:
    """For a step of `num_tokens` tokens, padding included. prefill: whether there may be rows that prefill. fuses:
    whether `attention_fused` takes the model."""
    if prefill:
        return _OTHERS
    ways = (*(_FUSED if fuses else ()), *_APART)
    return next((way for tokens, way in ways if num_tokens <= tokens), _OTHERS)
