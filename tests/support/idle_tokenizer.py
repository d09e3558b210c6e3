"""A tokenizer_proc that is ready at once and never does anything, unless it is ordered otherwise (`support.puppet`)."""

from __future__ import annotations

from support.puppet import play

from asyncengine.config import SidecarConfig
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.reports import TokenizerInfo
from asyncengine.wire.sidecar import Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    play(config, reporter, TokenizerInfo(has_chat_template=False))


if __name__ == "__main__":
    run_sidecar("tokenizer_proc", serve)
