"""An idle gpu_runner with a real grammar process below it."""

from __future__ import annotations

import subprocess
import sys

from support.idle_runner import INFO
from support.puppet import play

from asyncengine.config import GrammarConfig, SidecarConfig
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import Reporter, run_sidecar, write_config


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    command = [sys.executable, "-P", "-m", "gpu_runner.grammar.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as grammar:
        assert grammar.stdin is not None
        write_config(
            grammar.stdin,
            GrammarConfig(
                model_path=config.model_path, run_dir=config.run_dir, job="check", incarnation=0, eos_ids=(2,)
            ),
        )
        grammar.stdin.flush()
        play(config, reporter, INFO)


if __name__ == "__main__":
    run_sidecar("gpu_runner", serve)
