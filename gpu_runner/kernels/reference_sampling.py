"""Choosing the next token of each row, in plain torch: what the CPU runs and what the sampling kernel is tested
against. A row's token depends on its own logits, parameters, seed and position only, never on its place in the batch.

The recipe, for a row over ids 0 .. V - 1. Floats are float32; integers wrap at 32 bits; >>> shifts zeros in:

1.  NaN logits count as -inf and +inf as the largest float32, so that a broken row still yields an id below V.
2.  A temperature below 1e-5 is greedy: the smallest id with the largest logit, and nothing below applies. Else
    d = (logit - largest logit) * (1 / temperature). So d <= 0, and 0 for the best id.
3.  top-k, off at k <= 0 or k >= V: keep d >= the k-th largest d.
4.  top-p, off at p >= 1: among the kept, weight = floor(exp(d) * 2**40) as an integer, so that sums do not depend on
    their order; keep d >= t for the largest t that leaves at least p of the kept weight. The best id always stays.
5.  min-p, off at 0: keep d >= log(min_p), which is exp(d) >= min_p times the best id's. The logarithm is taken in
    float64 and rounded.
    In 3 to 5 ids whose d ties with the threshold all stay, so the order in which a sort would leave them is no matter.
6.  Gumbel-max (Gumbel, 1954) with counter-based noise. With lo, hi the halves of the row's 64-bit seed, `position` the
    index of the new token in its sequence and mix(x) = x ^= x >>> 16, x *= 0x7FEB352D, x ^= x >>> 15,
    x *= 0x846CA68B, x ^= x >>> 16 (the constants of C. Wellons' lowbias32):
        k0 = mix(mix(mix(lo + 0x9E3779B9) ^ hi) ^ position)
        k1 = mix(mix(mix(position + 0x85EBCA6B) ^ hi) ^ lo)
        h(id) = mix(k0 + id * 0x9E3779B9), with k1 added between mix's first multiplication and second shift
        v = min((float(h) + 0.5) * 2**-32, 1 - 2**-24), h unsigned and rounded to the nearest float32
        noise = -log(-log1p(-v)), precise where v is near 0, which is where winners are
    The token is the smallest id with the largest logit + temperature * noise among the kept: the order of d + noise,
    but known without the largest logit, so that a row without filters needs one pass over its logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
WEIGHT_ONE = 2.0**40
FLOAT32_MAX = torch.finfo(torch.float32).max
GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: odd, so that ids map to different counters."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of S rows, tensors [S] on the logits' device. position: index of the token being sampled."""

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    position: Tensor  # int32

    def __getitem__(self, rows: slice) -> SamplingRows:
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
        )


def ban_ids(logits: Tensor, ids: Tensor, banned: Tensor) -> None:
    """Set logits[i, ids[i, j]] to -inf where `banned[i]`, in place; ids outside the vocabulary (-1 pads) are ignored.

    logits: [S, vocab] float32, ids: [S, M] integers, banned: [S] bool.
    """
    applies = (ids >= 0) & (ids < logits.shape[1]) & banned[:, None]
    lowest = torch.where(applies, -math.inf, math.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(applies, ids, 0).to(torch.int64), lowest, "amin")


def greedy(logits: Tensor) -> Tensor:
    """The best id of each row. logits: [S, vocab] float32. Returns [S] int64."""
    return without_nan(logits).argmax(dim=-1)


def sample(logits: Tensor, rows: SamplingRows, *, filtered: bool) -> Tensor:
    """A token for each row. logits: [S, vocab] float32. Returns [S] int64.

    filtered: some row may have a top-k, top-p or min-p; without, they are not looked at, and the tokens are the same.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for part in _parts(logits, filtered=filtered):
        chosen = rows[part]
        score = without_nan(logits[part])
        is_greedy = (chosen.temperature < GREEDY_BELOW)[:, None]
        if filtered:
            keep = kept(scaled_distance(score, chosen.temperature), chosen) | is_greedy
            score = score.masked_fill(~keep, -math.inf)
        noise = gumbel_noise(chosen.seed, chosen.position, logits.shape[1])
        score += torch.where(is_greedy, 0.0, chosen.temperature[:, None]) * noise
        tokens[part] = score.argmax(dim=-1)
    return tokens


def scaled_distance(logits: Tensor, temperature: Tensor) -> Tensor:
    """Steps 1 and 2: d of every id, never NaN and never above 0; greedy rows as at temperature 1. [S, vocab]."""
    logits = without_nan(logits)
    best = logits.amax(dim=-1, keepdim=True)
    best = torch.where(best == -math.inf, 0.0, best)  # a row without any finite logit
    return (logits - best) * torch.where(temperature < GREEDY_BELOW, 1.0, temperature).reciprocal()[:, None]


def kept(distance: Tensor, rows: SamplingRows) -> Tensor:
    """Steps 3 to 5: which ids remain. distance: d, [S, vocab]. Returns [S, vocab] bool."""
    vocab = distance.shape[1]
    # For floats that are not positive the bits without the sign order them from the best down.
    key = distance.contiguous().view(torch.int32) & 0x7FFFFFFF
    k = torch.where((rows.top_k <= 0) | (rows.top_k > vocab), vocab, rows.top_k).to(torch.int64)
    keep = key <= _key_that_reaches(key, torch.ones_like(key, dtype=torch.int64), k)

    weight = torch.where(keep, distance.exp() * WEIGHT_ONE, 0.0).to(torch.int64)
    total = weight.sum(dim=-1)
    wanted = (total.to(torch.float64) * rows.top_p).ceil().to(torch.int64).clamp(min=1)
    keep &= (key <= _key_that_reaches(key, weight, wanted)) | (rows.top_p >= 1.0)[:, None]
    return keep & (distance >= rows.min_p.double().log().float()[:, None])


def uniform_bits(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """h of step 6 for every id; an unsigned 32-bit number held in int32. seed, position: [S]. Returns [S, vocab]."""
    low, high = (seed & 0xFFFFFFFF).to(torch.int32), (seed >> 32).to(torch.int32)
    position = position.to(torch.int32)
    first_key = _mix(_mix(_mix(low + _signed(GOLDEN)) ^ high) ^ position)
    second_key = _mix(_mix(_mix(position + _signed(0x85EBCA6B)) ^ high) ^ low)
    counter = torch.arange(vocab, dtype=torch.int32, device=seed.device) * _signed(GOLDEN)
    return _mix(first_key[:, None] + counter, second_key[:, None])


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The noise of step 6 for every id, [S, vocab] float32, always finite."""
    bits = uniform_bits(seed, position, vocab)
    v = bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def without_nan(logits: Tensor) -> Tensor:
    """Step 1."""
    return logits.nan_to_num(nan=-math.inf, posinf=FLOAT32_MAX, neginf=-math.inf)


def _key_that_reaches(key: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """The smallest key of a row whose weight, with that of all smaller keys, is at least `wanted`: a radix select.

    key: [S, vocab] int32, not negative. weight: [S, vocab] int64. wanted: [S] int64. Returns [S, 1] int32.
    """
    wanted = wanted[:, None]
    found = torch.zeros_like(wanted, dtype=torch.int32)
    for shift, bits in ((20, 11), (10, 10), (0, 10)):
        digit = (key >> shift) & (2**bits - 1)
        inside = (key >> (shift + bits)) == found if shift + bits < 31 else torch.ones_like(key, dtype=torch.bool)
        by_digit = torch.zeros(len(key), 2**bits, dtype=torch.int64, device=key.device)
        by_digit.scatter_add_(1, digit.to(torch.int64), torch.where(inside, weight, 0))
        up_to = by_digit.cumsum(dim=1)
        chosen = (up_to < wanted).sum(dim=1, keepdim=True).clamp(max=2**bits - 1)
        wanted = wanted - (up_to - by_digit).gather(1, chosen)
        found = (found << bits) | chosen.to(torch.int32)
    return found


def _parts(logits: Tensor, *, filtered: bool) -> Iterator[slice]:
    """Rows to work on at a time: few enough that a CPU's intermediate results stay in its cache and a GPU's small."""
    row_elements = max(logits.shape[1], 2**11 if filtered else 1)  # a radix select's table is 2**11 wide
    rows = max(1, (2**17 if logits.device.type == "cpu" else 2**24) // row_elements)
    for first in range(0, len(logits), rows):
        yield slice(first, first + rows)


def _mix(x: Tensor, between: Tensor | None = None) -> Tensor:
    x = x ^ _shift_right(x, 16)
    x = x * 0x7FEB352D
    if between is not None:
        x = x + between
    x = x ^ _shift_right(x, 15)
    x = x * _signed(0x846CA68B)
    x ^= _shift_right(x, 16)
    return x


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Of an int32 taken as unsigned."""
    return torch.bitwise_and(x >> count, 2 ** (32 - count) - 1)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned 32-bit number."""
    return value - 2**32 if value >= 2**31 else value
