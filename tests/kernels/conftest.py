from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.without_gpu import WithoutGpu, without_gpu


@pytest.fixture(scope="session")
def compiler() -> Iterator[WithoutGpu]:
    """Most of such a process's time is what it imports."""
    with without_gpu() as ask:
        yield ask
