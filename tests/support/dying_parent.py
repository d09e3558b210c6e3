"""A parent that starts sidecars, prints their pids and its run directory, and waits to be killed."""

from __future__ import annotations

import asyncio

from asyncengine.config import EngineConfig, Role
from asyncengine.supervisor import Supervisor

MODULES: dict[Role, str] = {
    "gpu_runner": "support.scripted_runner",
    "tokenizer_proc": "support.idle_tokenizer",
    "detokenizer_proc": "support.idle_detokenizer",
}


async def main() -> None:
    supervisor = Supervisor(EngineConfig(), on_failure=print, modules=MODULES)
    await supervisor.launch(await supervisor.prepare())
    print(*supervisor.pids().values(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
