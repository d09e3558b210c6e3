"""One open stream: a row of gpu_runner's, and the way of its tokens to text that is sent."""

from __future__ import annotations

from asyncengine.wire.frames import DetokenizeOptions, Open
from detokenizer_proc.deltas import DeltaOutbox, PendingDelta
from detokenizer_proc.logprob_gate import LogprobGate
from detokenizer_proc.stop_strings import StopSearch
from detokenizer_proc.text_stream import TextStream


class Row:
    """The row that holds a slot in generation `gen`. gate: what its text passes, None when all is shown at once.
    no_output: its token is not shown at all."""

    __slots__ = ("delta", "gate", "gen", "include_stop", "no_output", "outbox", "slot", "stream")

    def __init__(
        self,
        opened: Open,
        options: DetokenizeOptions,
        *,
        stream: TextStream,
        search: StopSearch | None,
        outbox: DeltaOutbox,
    ) -> None:
        self.slot = opened.slot
        self.gen = opened.gen
        self.stream = stream
        self.include_stop = options.include_stop_str_in_output
        self.no_output = options.no_output
        self.outbox = outbox
        self.delta = PendingDelta(opened.rid, opened.prompt_tokens, opened.cached_tokens, opened.shown, opened)
        self.gate: StopSearch | LogprobGate | None = LogprobGate(search, self.delta) if options.logprobs else search

    def unstage(self) -> None:
        """The row's last token shows no text: it has no log-probabilities either."""
        if isinstance(self.gate, LogprobGate):
            self.gate.unstage()
