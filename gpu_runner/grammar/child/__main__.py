"""`python -m gpu_runner.grammar.child`: a process that compiles grammars; gpu_runner starts, times and kills it."""

from __future__ import annotations

import os
import signal
import sys

from asyncengine.config import GrammarConfig
from asyncengine.wire.faults import print_fault
from asyncengine.wire.sidecar import arm_life_line, read_config, watch_parent


def main() -> None:
    """Serve until the parent is gone or kills this process."""
    arm_life_line()
    config = read_config(GrammarConfig, "a grammar process")
    watch_parent()
    sys.excepthook = print_fault
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group; the supervisor decides
    if config.job == "check":
        os.nice(10)  # what a request sent must not take the engine's own processes their cores
    from gpu_runner.grammar.child.worker import serve

    serve(config)


if __name__ == "__main__":
    main()
