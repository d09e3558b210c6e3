"""A tiny sidecar for the tests of its life-line: `python sidecar_child.py BEHAVIOUR`."""

from __future__ import annotations

import atexit
import os
import signal
import sys

from asyncengine.config import SidecarConfig
from asyncengine.errors import StartupError
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.reports import RunnerInfo
from asyncengine.wire.requests import Abort
from asyncengine.wire.sidecar import Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    behaviour = sys.argv[1]
    reporter.progress("loading weights", 1, 2)
    if behaviour == "raise":
        raise ValueError("the weights are upside down")
    if behaviour == "raise of a tokenizer":
        try:
            raise KeyError("zanzibar")
        except KeyError as error:
            raise ValueError("it is no number: zanzibar") from error
    if behaviour == "refuse":
        raise StartupError(f"cannot load {config.model_path}")
    if behaviour == "refuse and be stopped while leaving":
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        raise StartupError("no")
    inbox = pipes.receiver("runner.control", Abort)
    reporter.ready(
        RunnerInfo(
            device="cpu",
            dtype="float32",
            architecture="llama",
            vocab_size=16,
            max_model_len=config.engine.max_model_len or 0,
            num_pages=3,
            weight_bytes=4,
            kv_cache_bytes=5,
        )
    )
    assert reporter.heartbeat_due()
    reporter.heartbeat({"running": 0})
    assert not reporter.heartbeat_due()
    while True:
        inbox.wait(100)  # not for long: a signal just before it sleeps does not wake it


run_sidecar("tokenizer_proc" if "of a tokenizer" in sys.argv[1] else "gpu_runner", serve)
