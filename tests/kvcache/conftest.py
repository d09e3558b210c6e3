from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runner.kvcache.node import Node, RecencyList


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Every node that somebody who goes through a tree's recency list has come to."""
    visited: list[Node] = []
    whole = RecencyList.__iter__

    def visiting(nodes: RecencyList) -> Iterator[Node]:
        for node in whole(nodes):
            visited.append(node)
            yield node

    monkeypatch.setattr(RecencyList, "__iter__", visiting)
    return visited
