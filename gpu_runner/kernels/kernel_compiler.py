"""Compiles a model's kernels many at a time, before the first is launched and while weights load.

    thread 1  | rehearsal: works run on tensors without memory | compile 1  | compile 17 | ...
    thread 2  |   and every kernel is noted, none launched     | compile 2  | ...
    main      | load weights ......................................................... | wait

Triton compiles a kernel where it is first launched, one after the other. Four fifths of that time is spent in LLVM and
`ptxas`, outside Python's global lock, so threads share it: two took half the time of one. What is compiled is kept on
disk (`kernel_cache`), where the next start finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

Progress = Callable[[int, int], None]
"""Kernels that are ready, and in all."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """kernels: how many the rehearsal launched. compiled: how many of them were not in the cache."""

    kernels: int
    compiled: int


class KernelCompiler:
    """Starts when it is made. Until `wait` has returned, nobody else may launch a Triton kernel in this process, whose
    driver and hooks are in use. A context: leaving it drops what has not begun."""

    def __init__(self, rehearse: Callable[[], None], *, threads: int) -> None:
        """rehearse: calls every launch there will be, on tensors of the device "meta"; it runs in another thread."""
        self._rehearse = rehearse
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str, str], tuple[Any, str]] = {}  # by module, name, key: function, what to compile
        self._launchers: set[tuple[str, ...]] = set()
        self._compiled = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kernels")
        self._rehearsal = self._pool.submit(self._collect)

    def __enter__(self) -> KernelCompiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        knobs.compilation.listener = None

    def wait(self, progress: Progress) -> Compiled:
        """Until every kernel is compiled; raises what the rehearsal or a compilation raised."""
        progress(0, 0)
        jobs = self._rehearsal.result()
        for done, job in enumerate(as_completed(jobs), start=1):
            job.result()
            progress(done, len(jobs))
        return Compiled(kernels=len(jobs), compiled=self._compiled)

    def _collect(self) -> list[Future[None]]:
        """Rehearse, then have all that was found compiled."""
        with torch.inference_mode(), _launches_go_to(self._launched):
            self._rehearse()
        knobs.compilation.listener = self._count
        device = driver.active.get_current_device()
        for function, _ in self._found.values():
            function.device_caches[device]  # made here, not by several threads at once
        return [self._pool.submit(self._compile, *found) for found in self._found.values()]

    def _launched(self, *, key: Any, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        self._found[fn.module, fn.name, str(key)] = (fn.jit_function, compile["specialization_data"])
        return True

    def _compile(self, function: Any, specialization_data: str) -> None:
        kernel = function.preload(specialization_data)
        # A C compiler makes the host's side of a launch, once for all kernels that take the same types.
        types = tuple(map(str, kernel.src.signature.values()))
        with self._lock:
            first = types not in self._launchers
            self._launchers.add(types)
        if first:
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    def _count(self, *, cache_hit: bool, **_: object) -> None:
        with self._lock:
            self._compiled += not cache_hit


class _NoDevice:
    """The driver, of a device for which nothing is compiled ever: so nothing can be launched on it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return "none"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def _launches_go_to(hook: Callable[..., bool]) -> Iterator[None]:
    """Within, a launch of a kernel calls `hook`, which returns True, and does nothing else."""
    real = driver.active
    driver.set_active(_NoDevice(real.get_current_target()))  # type: ignore[arg-type]
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = None
        driver.set_active(real)
