"""Runs one detokenizer worker: `python -m detokenizer_proc`, its configuration on stdin."""

from __future__ import annotations

from asyncengine.wire.sidecar import run_sidecar
from detokenizer_proc.worker import serve

if __name__ == "__main__":
    run_sidecar("detokenizer_proc", serve)
