"""From the detokenizers' frames to the streams and the counts of the requests that they are about."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import repeat

import msgspec

from asyncengine.delta import FINISH_REASONS
from asyncengine.logprobs import TokenLogprob, unpack, unpack_prompt
from asyncengine.metrics import RequestMetrics
from asyncengine.open_requests import OpenRequests
from asyncengine.streams import RequestStream
from asyncengine.wire.answers import Deltas, Encoded, Marks, Openings, PromptColumns
from asyncengine.wire.base import Finish


class DeltaFeed:
    """Hands each request its part of a frame, and counts. For the owner: `heard`, streams that have news and are to be
    notified, `strays`, rids that run though nobody has them, or not any more, and `metrics`, where it counts."""

    def __init__(self, requests: OpenRequests, metrics: RequestMetrics) -> None:
        self._requests = requests
        self.metrics = metrics
        self.heard: dict[RequestStream, None] = {}
        self.strays: list[int] = []

    def encoded(self, message: Encoded) -> None:
        for rid in memoryview(message.rids).cast("Q"):
            if choice := self._requests.get(rid):
                choice.attempt.acknowledge()
                stream = choice.stream
                if message.at_ns and not stream.encoded:
                    stream.encoded = message.at_ns
                    self.metrics.encoded((message.at_ns - stream.arrived) / 1e9)

    def deltas(self, deltas: Deltas) -> None:
        """The one loop over requests. Raises TypeError, ValueError or IndexError for columns that contradict each
        other."""
        now = time.monotonic_ns()
        if deltas.openings is not None:
            self._open(deltas, deltas.openings)
        if deltas.marks is not None:
            self._mark(deltas, deltas.marks)
        for prompt in deltas.prompts:
            self._prompt(memoryview(deltas.rids).cast("Q")[prompt.row], prompt)
        news: list[int] = []  # when each had news before
        text, ids = deltas.text, deltas.ids
        text_start = ids_start = unused = 0
        logprobs: Iterable[Sequence[TokenLogprob]]
        logprobs = repeat((), len(deltas.rids) // 8) if deltas.logprobs is None else unpack(deltas.logprobs)
        for rid, text_end, ids_end, finish, stop_reason, prompt_tokens, cached_tokens, entries in zip(
            memoryview(deltas.rids).cast("Q").tolist(),  # quicker than to make the items one by one
            memoryview(deltas.text_ends).cast("i").tolist(),
            memoryview(deltas.ids_ends).cast("i").tolist(),
            deltas.finish,
            memoryview(deltas.stop_reason).cast("i").tolist(),
            memoryview(deltas.prompt_tokens).cast("i").tolist(),
            memoryview(deltas.cached_tokens).cast("i").tolist(),
            logprobs,
            strict=True,
        ):
            choice = self._requests.get(rid)
            new_ids = ids[4 * ids_start : 4 * ids_end]
            if choice is not None:
                if choice.repeated:
                    new_ids = choice.skip_repeated(new_ids)
                    unused += ids_end - ids_start - len(new_ids) // 4
                stream = choice.stream
                self.heard[stream] = None
                before = stream.feed(
                    choice.index,
                    text[text_start:text_end],
                    new_ids,
                    finish=finish,
                    stop_reason=stop_reason,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                    logprobs=entries,
                    now=now,
                )
                if before is not None:
                    news.append(before)
                    if finish or not before:
                        self._count_ends(stream, choice.index, bool(before), finish, now)
            else:
                unused += ids_end - ids_start
                if not finish:
                    self.strays.append(rid)
            text_start, ids_start = text_end, ids_end
        self.metrics.frame(now, news, tokens=len(deltas.ids) // 4 - unused)

    def count_end(self, stream: RequestStream, index: int, reason: str, *, at_ns: int) -> None:
        """Choice `index` is over."""
        timeline = msgspec.structs.replace(stream.timeline(index), finished=at_ns)
        self.metrics.ended(reason, timeline, tokens=stream.num_tokens(index), terms=stream.terms)

    def _count_ends(self, stream: RequestStream, index: int, begun_before: bool, finish: int, now: int) -> None:
        """Count the first and the last news of a choice."""
        if not begun_before and stream.num_tokens(index):
            self.metrics.begun(
                stream.timeline(index), prompt_tokens=stream.prompt_tokens(index), tenant=stream.terms.tenant
            )
        elif finish == Finish.LENGTH and not stream.num_tokens(index):  # nothing but its prompt was asked for
            self.metrics.prompted(stream.prompt_tokens(index), tenant=stream.terms.tenant)
        if finish:
            self.count_end(stream, index, FINISH_REASONS.get(Finish(finish), "error"), at_ns=now)

    def _prompt(self, rid: int, prompt: PromptColumns) -> None:
        if choice := self._requests.get(rid):
            choice.stream.take_prompt(choice.index, unpack_prompt(prompt))

    def _open(self, deltas: Deltas, openings: Openings) -> None:
        rids = memoryview(deltas.rids).cast("Q")
        stamps = memoryview(openings.stamps).cast("q")
        sessions = memoryview(openings.sessions).cast("i")
        for place, row in enumerate(memoryview(openings.rows).cast("i")):
            if choice := self._requests.get(rids[row]):
                choice.opened(deltas.shard)
                session = sessions[2 * place : 2 * place + 2]
                choice.stream.open(choice.index, *stamps[3 * place : 3 * place + 3], *session)

    def _mark(self, deltas: Deltas, marks: Marks) -> None:
        rids, begin = memoryview(deltas.rids).cast("Q"), 0
        for row, end in zip(memoryview(marks.rows).cast("i"), memoryview(marks.ends).cast("i"), strict=True):
            if choice := self._requests.get(rids[row]):
                choice.stream.mark(choice.index, marks.marks[16 * begin : 16 * end])
            begin = end
