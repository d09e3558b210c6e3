"""Runs a command and tells how far a server's predictions of its step times were off meanwhile.

    python scripts/watch_step_time.py --url http://127.0.0.1:8000 [--json out.json] -- COMMAND ...

Reads `asyncengine:step_time_error_ratio` of /metrics every half second: how far the predictions of recent steps with
prefill were off, relative to what they took. Exits as the command does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

NAME = "asyncengine:step_time_error_ratio"
EVERY_SECONDS = 0.5
MARKS = ("mean", "max", "last")


def step_time_error(url: str) -> float:
    """The gauge now; NaN where the server does not tell."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(NAME):
                    return float(line.rsplit(" ", 1)[1])
    except (urllib.error.URLError, TimeoutError):
        pass
    return float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    seen = []
    with subprocess.Popen(args.command) as process:
        while True:
            try:
                status = process.wait(EVERY_SECONDS)
                break
            except subprocess.TimeoutExpired:
                seen.append(step_time_error(args.url))
    errors = [error for error in seen if error > 0] or [float("nan")]
    found = {"samples": len(seen), "mean": float(np.mean(errors)), "max": max(errors), "last": errors[-1]}
    print("predicted step times were off by " + ", ".join(f"{100 * found[name]:.1f} % ({name})" for name in MARKS))
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
