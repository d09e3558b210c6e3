"""The processes of one engine, by their place in it: how each is started, and what is known of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncengine.child import Child, start_child
from asyncengine.config import NO_API_WORKERS, ApiWorkers, EngineConfig, Role, SidecarConfig, worker_key
from asyncengine.errors import StartupError
from asyncengine.metrics import make_block


class Children:
    """One process a place, which is a role and an index; the one that took another's place has the next life."""

    def __init__(self, config: EngineConfig, *, modules: Mapping[Role, str], api_workers: ApiWorkers) -> None:
        """modules: the module run for a role where it is not the role's own package."""
        self._config = config
        self._api_workers = api_workers
        self._modules: dict[Role, str] = {"api_worker": "asyncengine.api.worker", **modules}
        self._children: dict[tuple[str, int], Child] = {}
        self._metrics_fds: dict[int, int] = {}  # by API worker
        self.get = self._children.get

    def __iter__(self) -> Iterator[Child]:
        """Those that are there now."""
        return iter(list(self._children.values()))

    def __getitem__(self, place: tuple[Role, int]) -> Child:
        return self._children[place]

    def counts(self) -> dict[Role, int]:
        """How many of each role there are to be."""
        return {
            "gpu_runner": 1,
            "tokenizer_proc": self._config.tokenizer_workers,
            "detokenizer_proc": self._config.detokenizer_workers,
            "api_worker": self._api_workers.number,
        }

    def start(self, role: Role, index: int, run_dir: Path) -> Child:
        """Start the next one in this place. Raises `StartupError`."""
        before = self._children.get((role, index))
        inherit: tuple[int, ...] = ()
        if role == "api_worker":
            inherit = (*self._api_workers.listen_fds, self._metrics_fd(index, run_dir))
        child = start_child(
            self._config,
            role,
            index,
            self.counts()[role],
            module=self._modules.get(role, role),
            inherit=inherit,
            life=before.life + 1 if before else 0,
        )
        if before is not None:
            child.info, child.gauges = before.info, before.gauges
        self._children[role, index] = child
        return child

    def config_of(self, child: Child, *, model_path: Path, run_dir: Path) -> SidecarConfig:
        """What `child` is to know as things are now."""
        serves = child.role == "api_worker"
        others = [other for other in self if other is not child]
        return SidecarConfig(
            engine=self._config,
            role=child.role,
            index=child.index,
            model_path=str(model_path),
            run_dir=str(run_dir),
            api_workers=self._api_workers if serves else NO_API_WORKERS,
            metrics_fd=self._metrics_fds[child.index] if serves else None,
            life=child.life,
            lives={worker_key(other.role, other.index): other.life for other in others if other.life},
        )

    def all_ready(self) -> bool:
        return all(child.ready for child in self)

    def pids(self) -> dict[str, int]:
        """Process ids by name (the role, with the worker's index where there are several)."""
        return {child.name: child.process.pid for child in self}

    def lives(self) -> dict[str, int]:
        """Of every sidecar that took a lost one's place and is ready, by `worker_key`."""
        return {worker_key(child.role, child.index): child.life for child in self if child.life and child.ready}

    def close(self) -> None:
        """Give up what outlives each of them."""
        for fd in self._metrics_fds.values():
            os.close(fd)
        self._metrics_fds.clear()

    def _metrics_fd(self, worker: int, run_dir: Path) -> int:
        """The block in which this API worker counts, and whoever takes its place."""
        if worker not in self._metrics_fds:
            try:
                self._metrics_fds[worker] = make_block(run_dir, worker)
            except OSError as error:
                raise StartupError(f"cannot get memory for the engine's accounts: {error}") from error
        return self._metrics_fds[worker]
