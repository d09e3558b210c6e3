"""Stand-ins for all of an engine's processes (`support.puppet`), and an ear for what their supervisor tells."""

from __future__ import annotations

from asyncengine.config import Role

PUPPETS: dict[Role, str] = {
    "gpu_runner": "support.idle_runner",
    "tokenizer_proc": "support.idle_tokenizer",
    "detokenizer_proc": "support.idle_detokenizer",
    "api_worker": "support.status_listener",
}


class Heard:
    """What a supervisor tells the engine."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.relinks: list[tuple[str, int, int]] = []

    def relink(self, role: Role, index: int, life: int) -> None:
        self.relinks.append((role, index, life))
