"""The server under test: `asyncengine serve` in a process of its own, with the CPU model or the scripted runner."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos.terms import KEYS
from support.python_path import PYTHON_PATH

START_SECONDS = 180
STOP_SECONDS = 60
NEVER = 10**6
"""Losses of processes that end the engine; a chaos run makes any number."""


@dataclass(frozen=True)
class Setup:
    """module: what is run. args: of `serve`, besides those that every server here has. environ: besides this
    process's."""

    module: str
    api_workers: int
    args: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()

    @property
    def roles(self) -> dict[str, int]:
        """How many processes of each role there are as long as it serves."""
        workers = {"api_worker": self.api_workers} if self.api_workers > 1 else {}
        return {"server": 1, "tokenizer_proc": 2, "detokenizer_proc": 2, "gpu_runner": 1} | workers


def scripted(api_workers: int, *, step_ms: float = 20.0) -> Setup:
    """One row's token every `step_ms`."""
    args = ("--max-num-seqs", "128", "--max-model-len", "1024")
    return Setup(
        "support.scripted_cli",
        api_workers,
        args,
        (("ASYNCENGINE_SCRIPT", json.dumps({"step_ms": step_ms, "sessions": True})),),
    )


def cpu_model(api_workers: int, model: str) -> Setup:
    args = (model, "--max-num-seqs", "64", "--max-model-len", "512", "--kv-cache-tokens", "16384")
    # threads that wait for each other suffer most from the clients on the same cores
    return Setup("asyncengine.cli", api_workers, args, (("OMP_NUM_THREADS", "1"),))


class Server:
    """A server that is ready. `log` is its stderr."""

    def __init__(self, process: Process, port: int, folder: Path) -> None:
        self.process = process
        self.port = port
        self._folder = folder

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    async def stop(self) -> int:
        """End it as its operator would; its exit code. Raises TimeoutError when it does not end."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_SECONDS):
            return await self.process.wait()

    def left_behind(self) -> list[str]:
        """What an ended server has left in its temporary folder."""
        return sorted(path.name for path in (self._folder / "t").iterdir())


@asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[Server]:
    """A server for as long as the block lasts. Raises RuntimeError when it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # short: it is part of the names of sockets
    (folder / "t").mkdir()
    keys = folder / "keys"
    keys.write_text("".join(f"{key.line}\n" for key in KEYS))
    environ = {"PYTHONPATH": PYTHON_PATH, "TMPDIR": str(folder / "t"), **dict(setup.environ)}
    with (folder / "stderr").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", setup.module, "serve", "--port", "0", "--device", "cpu", *setup.args),
            *("--api-workers", str(setup.api_workers), "--tokenizer-workers", "2", "--detokenizer-workers", "2"),
            *("--max-crashes", str(NEVER), "--api-key-file", str(keys)),
            env=os.environ | environ,
            stdout=PIPE,
            stderr=stderr,
        )
    server = Server(process, 0, folder)
    try:
        server.port = await _ready_port(server)
        yield server
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shutil.rmtree(folder)


async def _ready_port(server: Server) -> int:
    assert server.process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        async for line in server.process.stdout:
            if match := re.match(rb"Ready: \S+ at http://127.0.0.1:(\d+)", line):
                return int(match[1])
    raise RuntimeError(f"the server did not start:\n{server.log()}")
