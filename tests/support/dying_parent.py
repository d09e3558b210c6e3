"""A parent that starts idle sidecars, prints their pids once they are there (`spawned`) or all are ready (`ready`), and
waits to be killed: `python -m support.dying_parent spawned|ready RUNNER_MODULE`."""

from __future__ import annotations

import asyncio
import sys

from asyncengine.config import EngineConfig
from asyncengine.supervisor import Supervisor


async def main() -> None:
    modules = {
        "gpu_runner": sys.argv[2],
        "tokenizer_proc": "support.idle_tokenizer",
        "detokenizer_proc": "support.idle_detokenizer",
    }
    supervisor = Supervisor(EngineConfig(), on_failure=print, modules=modules)  # type: ignore[arg-type]
    launching = asyncio.create_task(supervisor.launch(await supervisor.prepare()))
    while len(supervisor.pids()) < 3 or not (sys.argv[1] == "spawned" or launching.done()):
        await asyncio.sleep(0.01)
    print(*supervisor.pids().values(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
