"""Runs one tokenizer worker: `python -m tokenizer_proc`, its configuration on stdin."""

from __future__ import annotations

from asyncengine.wire.sidecar import run_sidecar
from tokenizer_proc.worker import serve

if __name__ == "__main__":
    run_sidecar("tokenizer_proc", serve)
