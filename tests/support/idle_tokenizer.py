"""A tokenizer_proc that is ready at once and never does anything."""

from __future__ import annotations

import time

from asyncengine.config import SidecarConfig
from asyncengine.wire.messages import TokenizerInfo
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    reporter.ready(TokenizerInfo(vocab_size=49152, has_chat_template=False))
    while True:
        reporter.heartbeat({})
        time.sleep(0.25)


if __name__ == "__main__":
    run_sidecar("tokenizer_proc", serve)
