"""Tokens by tenant, in memory that other processes read while it is written.

    row     name, UTF-8 padded with zeros   prompt tokens   output tokens

A row belongs to the first tenant that came when it was free, for good, and its name is there before anything is counted
in it. Tenants that find none free share the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_TENANTS = 256
NAME_BYTES = 128
ROW_BYTES = NAME_BYTES + 16
TABLE_BYTES = MAX_TENANTS * ROW_BYTES
OTHERS = "(others)"


class TenantTokens(NamedTuple):
    prompt: int
    output: int

    def plus(self, other: TenantTokens | None) -> TenantTokens:
        return self if other is None else TenantTokens(self.prompt + other.prompt, self.output + other.output)


class TenantTable:
    """The one writer of a table. memory: `TABLE_BYTES` of zeros, or what another one wrote that is no more."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._counts = memory.cast("d")
        names = (_name(memory, row) for row in range(MAX_TENANTS - 1))
        self._rows = {name: row for row, name in enumerate(names) if name}

    def count(self, tenant: str, *, prompt: int = 0, output: int = 0) -> None:
        """Where callers are not told apart, whose tenant is "", there is nothing to count."""
        if tenant and (prompt or output):
            row = self._rows.get(tenant)
            place = (self._take_row(tenant) if row is None else row) * ROW_BYTES // 8 + NAME_BYTES // 8
            self._counts[place] += prompt
            self._counts[place + 1] += output

    def close(self) -> None:
        self._counts.release()
        self._memory.release()

    def _take_row(self, tenant: str) -> int:
        name, row = tenant.encode(), len(self._rows)
        if len(name) > NAME_BYTES or row >= MAX_TENANTS - 1:
            name, row = OTHERS.encode(), MAX_TENANTS - 1
        else:
            self._rows[tenant] = row
        self._memory[row * ROW_BYTES : row * ROW_BYTES + len(name)] = name
        return row


def read_tenants(table: memoryview) -> Iterator[tuple[str, TenantTokens]]:
    """Of each tenant that has had any."""
    counts = table.cast("d")
    for row in range(MAX_TENANTS):
        place = row * ROW_BYTES // 8 + NAME_BYTES // 8
        tokens = TenantTokens(int(counts[place]), int(counts[place + 1]))
        if any(tokens):
            yield _name(table, row), tokens


def _name(table: memoryview, row: int) -> str:
    return bytes(table[row * ROW_BYTES : row * ROW_BYTES + NAME_BYTES]).rstrip(b"\0").decode(errors="replace")
