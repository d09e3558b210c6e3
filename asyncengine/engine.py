"""The engine as a library: starts the sidecars, takes prompts, hands back streams of deltas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Mapping

from asyncengine.config import EngineConfig, Role
from asyncengine.engine_info import DRAINING, Health
from asyncengine.errors import EngineError
from asyncengine.front_end import FrontEnd
from asyncengine.startup_progress import StartupProgress
from asyncengine.supervisor import Supervisor

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.05


class AsyncEngine(FrontEnd):
    """An engine: `async with AsyncEngine.start(config) as engine`, or `engine = await AsyncEngine.start(config)` and
    `await engine.close()`. Belongs to the event loop it was started in."""

    def __init__(
        self, config: EngineConfig, *, progress: StartupProgress | None, modules: Mapping[Role, str] | None
    ) -> None:
        super().__init__(config, worker=0)
        self._supervisor = Supervisor(
            config, on_failure=self._fail, on_relink=self._replaced, progress=progress, modules=modules
        )
        self._begun = False
        self._failed = asyncio.Event()

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        progress: StartupProgress | None = None,
        modules: Mapping[Role, str] | None = None,
    ) -> AsyncEngine:
        """An engine that starts when awaited or entered; that raises `StartupError` and then leaves nothing behind.

        modules: the module to run for a role in place of the role's own package.
        """
        return cls(config, progress=progress, modules=modules)

    def __await__(self) -> Generator[object, None, AsyncEngine]:
        return self._start().__await__()

    async def __aenter__(self) -> AsyncEngine:
        return await self._start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop everything: open streams raise `EngineDeadError`, no process, socket or file is left. Idempotent."""
        self._shut("the engine was closed")
        await self._supervisor.close()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait until those there are have ended, at most so long. False when the engine has
        failed meanwhile."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._requests.count and not self._failed.is_set():
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
        return not self._failed.is_set()

    def gauges(self) -> dict[str, int]:
        """Latest gauges of gpu_runner (running, waiting, free_pages, cached_pages, total_pages, gpu_busy_permille,
        host_us_per_step, ...; at most about 0.25 s old), how often each role's processes were replaced
        (`gpu_runner_restarts`, ...), how many requests were ended because they crash gpu_runner (`convicted_requests`),
        and `open_streams` of this process. running and waiting count choices that have left the tokenizers; while
        gpu_runner is being replaced, all of them wait."""
        gauges = self._supervisor.engine_gauges(unfinished=self._requests.num_unfinished)
        return gauges | {"open_streams": self._requests.count}

    @property
    def health(self) -> Health:
        if self._state == "ready":
            return DRAINING if self._draining else self._supervisor.health()
        return Health(state=self._state, detail=self._detail)

    async def wait_failed(self) -> str:
        """Sleep until a process of the engine is lost, which it cannot recover from; returns what happened."""
        await self._failed.wait()
        return self._detail

    async def _start(self) -> AsyncEngine:
        if self._begun:
            raise EngineError("an AsyncEngine is started once")
        self._begun = True
        try:
            model = await self._supervisor.prepare()
            self._open(self._supervisor.pipes, self._supervisor.run_dir)
            await self._supervisor.launch(model)
            info = self._supervisor.engine_info(model)
            self._serve(info, tokenizer_workers=self._config.tokenizer_workers)
        except BaseException:
            await self.close()
            raise
        return self

    def _replaced(self, role: Role, index: int, life: int) -> None:
        self._relink(role, index, life, self._supervisor.crash)

    def _fail(self, reason: str) -> None:
        logger.error("the engine has failed: %s", reason)
        self._end_streams("failed", reason)
        self._failed.set()
