"""A gpu_runner that is ready at once and never does anything, unless it is ordered otherwise (`support.puppet`)."""

from __future__ import annotations

from support.puppet import play

from asyncengine.config import SidecarConfig
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.reports import RunnerInfo
from asyncengine.wire.sidecar import Reporter, run_sidecar

INFO = RunnerInfo(
    device="cuda",
    dtype="float32",
    architecture="idle",
    vocab_size=16,
    max_model_len=64,
    num_pages=3,
    weight_bytes=4,
    kv_cache_bytes=5,
)


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    play(config, reporter, INFO)


if __name__ == "__main__":
    run_sidecar("gpu_runner", serve)
