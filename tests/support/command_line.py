"""Runs the `asyncengine` command as a user does, with the scripted runner in place of a model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.python_path import PYTHON_PATH


class Command:
    """A running `asyncengine` with its own temporary directory and, below it, its run directory."""

    def __init__(self, short_path: Path, *args: str, **script: object) -> None:
        self.short_path = short_path
        env = os.environ | {
            "PYTHONPATH": PYTHON_PATH,
            "TMPDIR": str(short_path),
            "ASYNCENGINE_SCRIPT": json.dumps(script),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.scripted_cli", *args],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the output ended without {pattern!r}: {self.finish()}")

    def children(self) -> list[int]:
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listing.split()]

    def finish(self, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, rest of stdout, stderr; and nothing is left of it."""
        out, err = self.process.communicate(stdin, timeout=60)
        assert [*self.short_path.iterdir()] == []
        return self.process.returncode, out, err


@contextmanager
def running(short_path: Path, *args: str, **script: object) -> Iterator[Command]:
    command = Command(short_path, *args, **script)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.communicate()


def all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def ask(url: str) -> str:
    body = json.dumps({"prompt": "one two three", "max_tokens": 20}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text
