"""The real tokenizer process, which cannot bear two texts: one crashes it, over the other it computes for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from asyncengine.wire.sidecar import run_sidecar
from tokenizer_proc import trial, worker
from tokenizer_proc.vocabulary import Vocabulary

CRASH, SPIN = "poison that crashes", "poison that spins"


class Poisoned(Vocabulary):
    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Any:
        if any(CRASH in text for text in texts):
            os.kill(os.getpid(), signal.SIGSEGV)
        while any(SPIN in text for text in texts):
            pass
        return super()._encode(texts, add_special_tokens=add_special_tokens)


if __name__ == "__main__":
    trial.TURN_CPU_SECONDS = worker.TURN_CPU_SECONDS = 0.4
    worker.Vocabulary = Poisoned  # type: ignore[misc]
    run_sidecar("tokenizer_proc", worker.serve)
