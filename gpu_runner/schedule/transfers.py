"""Copies of KV pages between the device and host memory, which run beside the steps."""

from __future__ import annotations

from typing import NamedTuple

from gpu_runner.schedule.plan import Int32


class Transfers(NamedTuple):
    """One batch of copies, all of which may run at once: no page is in it twice. Batches are done in order of `ticket`.

    stores: `store_from[i]` on the device to `store_to[i]` in host memory, [S] each. loads: `load_from[i]` in host
    memory to `load_to[i]` on the device, [L] each. No step in flight or planned touches the device pages before the
    batch is done, but to read the stores'; what is stored was written by steps that are done.
    """

    ticket: int
    store_from: Int32
    store_to: Int32
    load_from: Int32
    load_to: Int32
