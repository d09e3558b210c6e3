"""How the decode rows of a step attend: by which kernels, and in how many ranges of keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_runner.kernels.work_list import LARGE_CUT, MULTIPROCESSORS, RangeCut


@dataclass(frozen=True, slots=True)
class DecodeWay:
    """fused_warps: of each program of `attention_fused`. None: `attention_decode`, behind a kernel that rotates, or, if
    `streams`, rotating itself, as it can for all models that `attention_fused` takes. long_bytes: of a layer's keys and
    values in the cache; a step that reads so many is long, and takes another way. None: no step is."""

    cut: RangeCut
    fused_warps: int | None = None
    long_bytes: int | None = None
    streams: bool = False


# Up to so many tokens, from the output of `scripts/bench_kernels/attention_layer.py` and, in whole layers, of
# `linear.py`, with 8 KV heads. A multiprocessor has one program of eight warps of the fused kernel at a time, or two of
# four. A start, with the first keys' way from memory, is not hidden where the program is alone. Steps are long from
# about where the ways of `_LONG` are faster: by up to a quarter further on.
_MOST = LARGE_CUT.programs
_SHORT = DecodeWay(RangeCut(_MOST, 256, at_once=MULTIPROCESSORS, start_keys=100), fused_warps=8)
_FUSED = (
    (2, replace(_SHORT, long_bytes=3_000_000)),
    (4, replace(_SHORT, long_bytes=6_000_000)),
    (
        16,
        DecodeWay(RangeCut(_MOST, 512, at_once=MULTIPROCESSORS, start_keys=200), fused_warps=8, long_bytes=40_000_000),
    ),
    (
        32,
        DecodeWay(
            RangeCut(_MOST, 512, at_once=2 * MULTIPROCESSORS, start_keys=100), fused_warps=4, long_bytes=65_000_000
        ),
    ),
    (64, DecodeWay(RangeCut(_MOST, 512, at_once=4 * MULTIPROCESSORS, start_keys=150), streams=True)),
    (128, DecodeWay(RangeCut(4 * MULTIPROCESSORS, 512))),
)
# Short ranges of one to four rows fill the multiprocessors, however long the rows are. Keys and values that stream
# through shared memory hide more of each other's way than registers do, four programs of `attention_decode` to a
# multiprocessor. That pays once there are enough of them: in many rows, or in some long ones.
_LONG = (
    (4, DecodeWay(RangeCut(_MOST, 128, at_once=2 * MULTIPROCESSORS, start_keys=100), fused_warps=4)),
    (32, DecodeWay(RangeCut(_MOST, 256, at_once=4 * MULTIPROCESSORS, start_keys=150), streams=True)),
)
# Of models that the fused kernel does not take.
_APART = (
    (32, DecodeWay(RangeCut(_MOST, 256, at_once=4 * MULTIPROCESSORS, start_keys=150))),
    (128, DecodeWay(RangeCut(4 * MULTIPROCESSORS, 512))),
)
_OTHERS = DecodeWay(LARGE_CUT)


def choose_decode(num_tokens: int, *, prefill: bool, fuses: bool, long: bool = False) -> DecodeWay:
    """For a step of `num_tokens` tokens, padding included. prefill: whether there may be rows that prefill. fuses:
    whether `attention_fused` takes the model. long: whether the step reads at least the `long_bytes` of the way that it
    takes otherwise."""
    if prefill:
        return _OTHERS
    ways = _APART if not fuses else _LONG if long else _FUSED
    return next((way for tokens, way in ways if num_tokens <= tokens), _OTHERS)
