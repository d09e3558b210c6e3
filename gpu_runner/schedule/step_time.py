"""What a step takes on the device, learned from the steps that it has run.

    time = base(bucket) + context x ns per token + pairs x ns per pair

context: cached tokens that decode rows attend to. pairs: of a prefill token and a token that it attends to, which is
what makes a chunk far into a prompt dearer than one at its beginning. Steps with and without prefill run on different
kernels, so each kind has bases of its own. So do steps whose decode rows have long contexts, but these take about as
long as the others where they begin.

A bucket remembers what its own steps were like on average (time, context, pairs), and forgets only by newer ones: hours
of decoding leave what is known of prefill as it was. The two slopes come of how a step differs from the average of its
bucket, so that no bucket's base can pass for a slope. A Kalman filter learns them from each step as much as it tells: a
lot of one that attends to much more or less than usual, nothing of one that does not.

A step that took much longer or shorter than all of that explains says nothing (a suspended process), unless a few in a
row do: then the device has changed its speed, and everything that is known of it is scaled at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from gpu_runner.schedule.buckets import bucket_for
from gpu_runner.schedule.plan import StepPlan, StepResult

DECODE_SAMPLE = 16
"""Of so many steps without prefill one is learned from."""
_MEMORY = 16  # steps, of a bucket's average
_FAMILIAR = 4  # steps after which a bucket's average is believed
_NOISE = 0.05  # of a step's time, relative
_DRIFT = 0.02  # of a slope from one step to the next, relative
_SURPRISE = 0.5  # of what was expected; more is none of the device's usual variation
_NEWS = 3  # surprises in a row, all longer or all shorter
_MAX_SCALE = 4.0
_SCALE_DOUBT = 0.25  # of the slopes, relative, once they were scaled
_ERROR_MEMORY = 32  # steps


def attended_pairs(position: int, tokens: int) -> int:
    """Of `tokens` behind `position` others, each of which attends to itself and all before it."""
    return tokens * position + tokens * (tokens + 1) // 2


class StepTime:
    """Times in ns. Before it has seen a step all times are 0; with a device that has no clock it stays so."""

    def __init__(self, buckets: tuple[int, ...]) -> None:
        """buckets: of a step's tokens, ascending."""
        self._buckets = buckets
        self._decode = _Kind()
        self._mixed = _Kind()  # steps with prefill
        self._slopes = _Slopes()
        self._seen: list[int] = []  # buckets of either kind, ascending
        self._last_end = 0
        self.error = 0.0
        """How far recent predictions of steps with prefill were off, relative, on average."""

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        """The next step in order is done. It took what lies between its end and that of the step before, or its begin
        if that was later: the gap that a stream sees."""
        end = result.device_end_ns
        took = end - max(result.device_begin_ns, self._last_end)
        self._last_end = end
        decodes = plan.num_decode_rows
        prefills = len(plan.row_slot) > decodes
        if not prefills and plan.step % DECODE_SAMPLE and self._decode.is_familiar(plan.bucket):
            return
        if took <= 0:
            return
        context = int(plan.row_start[:decodes].sum()) + decodes
        pairs = 0
        if prefills:
            chunks = zip(plan.row_start[decodes:].tolist(), plan.row_len[decodes:].tolist(), strict=True)
            pairs = sum(attended_pairs(start, length) for start, length in chunks)
        self.learn(took, plan.bucket, context, pairs)

    def learn(self, took: float, bucket: int, context: int, pairs: int) -> None:
        """A step of `bucket` tokens took so long."""
        kind = self._mixed if pairs else self._decode
        expected = self.step_ns(bucket, context, pairs)
        if pairs and expected:
            off = min(abs(took - expected) / took, 1.0)
            self.error += (off - self.error) / _ERROR_MEMORY
        mean = kind.means.get(bucket)
        if mean is None:
            kind.means[bucket] = _Mean(took, context, pairs)
            if bucket not in self._seen:
                insort(self._seen, bucket)
            return
        error = took - expected
        doubt = self._slopes.doubt(context - mean.context, pairs - mean.pairs)
        surprising = abs(error) > max(_SURPRISE * min(expected, took), 3.0 * doubt)
        if surprising and mean.count >= _FAMILIAR:
            if kind.is_news(longer=error > 0.0):
                ratio = min(max(took / max(expected, 1.0), 1.0 / _MAX_SCALE), _MAX_SCALE)
                for known in (self._slopes, self._decode, self._mixed):
                    known.scale(ratio)
            return
        if not surprising:
            kind.surprises = 0
        self._slopes.learn(error, took, mean, context, pairs)
        mean.add(took, context, pairs)

    def step_ns(self, bucket: int, context: int, pairs: int) -> float:
        """What a step of `bucket` tokens, padding included, would take; `pairs` is 0 if none of them are prefill."""
        slopes = self._slopes
        return self._base(bucket, bool(pairs)) + slopes.context * context + slopes.pairs * pairs

    def decode_ns(self, bucket: int, context: int) -> float:
        """What a step of nothing but decode rows takes at the least: as `step_ns`, but that a bucket smaller than all
        that were seen has its tokens' part of the smallest one's time. Where every step was a full one, the steps that
        would show what smaller ones take are not run otherwise: decoding would seem to need a full step's time."""
        smallest = self._seen[0] if self._seen else bucket
        return self._base(bucket, False) * min(1.0, bucket / smallest) + self._slopes.context * context

    def prefill_ns(self, tokens: int, context: int) -> float:
        """What it would take to prefill `tokens` behind `context` others, in steps of nothing else."""
        largest = self._buckets[-1]
        full, rest = divmod(tokens, largest)
        base = full * self._base(largest, True)
        if rest:
            base += self._base(bucket_for(self._buckets, rest), True)
        return base + self._slopes.pairs * attended_pairs(context, tokens)

    def _base(self, bucket: int, prefills: bool) -> float:
        """Of a bucket that was never seen: between its neighbours; beyond the largest it grows with the tokens, which
        is the worst that there is; below the smallest it is no less."""
        seen = self._seen
        place = bisect_left(seen, bucket)
        if place < len(seen) and (place == 0 or seen[place] == bucket):
            return self._seen_base(seen[place], prefills)
        if place == 0:
            return 0.0
        low = seen[place - 1]
        base = self._seen_base(low, prefills)
        if place == len(seen):
            return base * bucket / low
        high = seen[place]
        return base + (self._seen_base(high, prefills) - base) * (bucket - low) / (high - low)

    def _seen_base(self, bucket: int, prefills: bool) -> float:
        """Of the other kind, where no step of this one has been seen: that is nearer than anything else."""
        first, other = (self._mixed, self._decode) if prefills else (self._decode, self._mixed)
        mean = first.means.get(bucket) or other.means[bucket]
        slopes = self._slopes
        return max(0.0, mean.took - slopes.context * mean.context - slopes.pairs * mean.pairs)


class _Mean:
    """Of one bucket's steps, the newest counting most. Never fewer than one step."""

    __slots__ = ("context", "count", "pairs", "took")

    def __init__(self, took: float, context: float, pairs: float) -> None:
        self.count = 1
        self.took = took
        self.context = context
        self.pairs = pairs

    def add(self, took: float, context: float, pairs: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.took += (took - self.took) / self.count
        self.context += (context - self.context) / self.count
        self.pairs += (pairs - self.pairs) / self.count


class _Slopes:
    """ns per token of context and per pair, neither negative, and how sure that is: a Kalman filter of two values."""

    def __init__(self) -> None:
        self.context = 0.0
        self.pairs = 0.0
        # variances and covariance; 0 until the first step that says something
        self._vc = self._vp = self._cov = 0.0

    def doubt(self, context: float, pairs: float) -> float:
        """Standard deviation, in ns, of the time that is said to come of so much more context and so many pairs."""
        vc, vp, cov = self._vc, self._vp, self._cov
        variance = vc * context * context + 2.0 * cov * context * pairs + vp * pairs * pairs
        return math.sqrt(max(variance, 0.0))

    def learn(self, error: float, took: float, mean: _Mean, context: float, pairs: float) -> None:
        """A step took `error` more than was expected, and `took` in all; mean: of its bucket."""
        most_c = took / context if context else math.inf  # if all of its time came of it
        most_p = took / pairs if pairs else math.inf
        c, p = context - mean.context, pairs - mean.pairs
        if c and context and not self._vc:  # a step without any says nothing of it
            self._vc = most_c * most_c
        if p and not self._vp:
            self._vp = most_p * most_p
        hc, hp = self._vc * c + self._cov * p, self._cov * c + self._vp * p
        # what is far off may well not come of the slopes
        noise = _NOISE * took + 0.5 * abs(error)
        total = c * hc + p * hp + noise * noise
        self.context = min(max(self.context + error * hc / total, 0.0), most_c)
        self.pairs = min(max(self.pairs + error * hp / total, 0.0), most_p)
        self._vc = max(self._vc - hc * hc / total, 0.0) + (_DRIFT * self.context) ** 2
        self._vp = max(self._vp - hp * hp / total, 0.0) + (_DRIFT * self.pairs) ** 2
        self._cov -= hc * hp / total

    def scale(self, ratio: float) -> None:
        self.context *= ratio
        self.pairs *= ratio
        self._vc = self._vc * ratio * ratio + (_SCALE_DOUBT * self.context) ** 2
        self._vp = self._vp * ratio * ratio + (_SCALE_DOUBT * self.pairs) ** 2
        self._cov *= ratio * ratio


class _Kind:
    """What is known of the steps with prefill, or of those without. surprises: in a row, negative if shorter."""

    def __init__(self) -> None:
        self.means: dict[int, _Mean] = {}  # by bucket
        self.surprises = 0

    def is_familiar(self, bucket: int) -> bool:
        mean = self.means.get(bucket)
        return mean is not None and mean.count >= _FAMILIAR and not self.surprises

    def is_news(self, *, longer: bool) -> bool:
        """Whether this surprise, a step that was longer or shorter than all that is known explains, is one too many."""
        self.surprises = max(self.surprises, 0) + 1 if longer else min(self.surprises, 0) - 1
        return abs(self.surprises) == _NEWS

    def scale(self, ratio: float) -> None:
        self.surprises = 0
        for mean in self.means.values():
            mean.took *= ratio
            mean.count = 1  # whatever was scaled wrongly is soon forgotten
