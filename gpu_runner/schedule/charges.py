"""What tenants' accounts (`Tenants`) are told of the tokens that rows compute: of each position once."""

from __future__ import annotations

import numpy as np

from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import Slots
from gpu_runner.schedule.tenants import Tenants


class Charges:
    """Each token of a prompt that a row computes is charged, and each token of output that it has, once.

    `Slots.charged` says how far a row's are. It only rises: what is computed again after a retraction, which was
    for the sake of others, costs nothing, nor does what a request that goes on after a loss had before.

        positions   0 .. cached | cached .. prompt_len | prompt_len ..
        charged     nothing     | 1 each               | OUTPUT_WEIGHT each, as the row has the token behind it

    Decoded tokens are counted when a row leaves, and for all rows at once before tenants are compared: not in each
    step.
    """

    def __init__(self, slots: Slots, running: Running, tenants: Tenants) -> None:
        self._slots = slots
        self._running = running
        self._tenants = tenants

    def bring_up_to_date(self) -> None:
        """Of all rows that decode."""
        rows, slots = self._running.decode, self._slots
        charged = slots.charged[rows.index]
        tokens = np.maximum(rows.known - 1 - charged, 0)  # a row's first is charged before it is known
        self._tenants.charge_outputs(slots.account[rows.index], tokens)
        slots.charged[rows.index] = charged + tokens

    def prefill(self, slot: int, end: int) -> None:
        """A row computes its tokens up to `end`, and samples one if that is all of them."""
        slots = self._slots
        account, prompt_len = slots.account.item(slot), slots.prompt_len.item(slot)
        charged, prompt_end = slots.charged.item(slot), min(end, prompt_len)
        if prompt_end > charged:
            self._tenants.charge_prompt(account, prompt_end - charged)
            slots.charged[slot] = prompt_end
        if end == slots.known.item(slot):
            self._tenants.charge_output(account, end - max(charged, prompt_len - 1))
            slots.charged[slot] = end

    def rest(self, slot: int) -> None:
        """Of a row that ends or is retracted, and has left its list."""
        slots = self._slots
        known, charged = slots.known.item(slot), slots.charged.item(slot)
        tokens = known - 1 - charged
        if tokens > 0 and known > slots.prompt_len.item(slot):
            slots.charged[slot] = charged + tokens
            self._tenants.charge_output(slots.account.item(slot), tokens)
