"""What tenants' accounts (`Tenants`) are told of the tokens that rows decode."""

from __future__ import annotations

from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import Slots
from gpu_runner.schedule.tenants import Tenants


class Charges:
    """Decoded tokens are counted when a row leaves, and for all rows at once before tenants are compared: not in each
    step. `Slots.charged` says how far each row's are known."""

    def __init__(self, slots: Slots, running: Running, tenants: Tenants) -> None:
        self._slots = slots
        self._running = running
        self._tenants = tenants

    def bring_up_to_date(self) -> None:
        """Of all rows that decode."""
        rows, charged = self._running.decode, self._slots.charged
        self._tenants.charge_outputs(self._slots.account[rows.index], rows.start - charged[rows.index])
        charged[rows.index] = rows.start

    def rest(self, slot: int) -> None:
        """Of a row that ends or is retracted, and has left its list."""
        slots = self._slots
        tokens = int(slots.computed[slot] - slots.charged[slot])
        if tokens:
            slots.charged[slot] = slots.computed[slot]
            self._tenants.charge_output(int(slots.account[slot]), tokens)
