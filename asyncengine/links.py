"""An API process's pipes into the ring, each of which leads to the process that is in its reader's place now."""

from __future__ import annotations

import time

from asyncengine.config import Role
from asyncengine.questions import Questions
from asyncengine.recent_rids import RecentRids
from asyncengine.tokenizer_links import TokenizerLink, TokenizerLinks
from asyncengine.wire.pipes import Pipes, Sender, pipe_name
from asyncengine.wire.requests import Abort, ReleaseSession, Relink

Lives = dict[tuple[Role, int], int]
"""How often the process in each place has been replaced, where that is not never."""


class Links:
    """The pipes to the tokenizers and to gpu_runner's control.

    Every tokenizer pipe carries the news of which gpu_runner, detokenizers and API workers were replaced, ahead of all
    that is sent for the new ones, or by them:

        detokenizer 1 lost    tokenizer.0   | ... | Relink(detokenizer, 1, 1) | sent again | ...
        tokenizer 0 lost      tokenizer.0   | ... | x
                              tokenizer.0.1       | Relink(detokenizer, 1, 1) | sent again | ...
    """

    def __init__(self, pipes: Pipes, *, tokenizer_workers: int, lives: Lives, questions: Questions) -> None:
        """lives: as known so far."""
        self._pipes = pipes
        self._lives = dict(lives)
        self._aborted = RecentRids()
        self._control = self._sender("runner.control", "gpu_runner", 0)
        senders = [self._tokenizer_sender(index) for index in range(tokenizer_workers)]
        self.tokenizers = TokenizerLinks(senders, questions)
        for link in self.tokenizers:
            self._tell_lives(link)

    def life(self, role: Role, index: int) -> int:
        """Of the process that is in this place as far as is known here."""
        return self._lives.get((role, index), 0)

    def relink(self, role: Role, index: int, life: int) -> bool:
        """Process `index` of `role` was lost, and number `life` is in its place. False if that is no news."""
        if life <= self.life(role, index):
            return False
        self._lives[role, index] = life
        if role == "tokenizer_proc":
            link = self.tokenizers[index]
            self._pipes.drop(link.sender)
            link.sender = self._tokenizer_sender(index)
            self._tell_lives(link)
        elif role == "gpu_runner":
            self._pipes.drop(self._control)
            self._control = self._sender("runner.control", role, 0)
            for link in self.tokenizers:
                self._tell_lives(link)  # those of others too: it may have been started with older ones
        elif role in ("detokenizer_proc", "api_worker"):
            for link in self.tokenizers:
                link.sender.send(Relink(role, index, life))
        return True

    def abort(self, rid: int, tokenizer: TokenizerLink) -> None:
        """Have `rid`, which was sent to `tokenizer`, end wherever it is."""
        self._aborted.add(rid, time.monotonic())
        abort = Abort(rid)
        self._control.send(abort)
        tokenizer.sender.send(abort)

    def abort_stray(self, rid: int) -> None:
        """Have `rid` end, which runs though nobody here has it; unless it was aborted a moment ago and what came of it
        may have been on its way."""
        if self._aborted.add(rid, time.monotonic()):
            self._control.send(Abort(rid))

    def release_session(self, tenant: str, session: str) -> None:
        self._control.send(ReleaseSession(tenant, session))

    def flush(self) -> bool:
        """Push on what found a pipe full; True when nothing is left."""
        flushed = [sender.flush() for sender in (self._control, *(link.sender for link in self.tokenizers))]
        return all(flushed)

    def _tell_lives(self, link: TokenizerLink) -> None:
        for role in ("gpu_runner", "detokenizer_proc", "api_worker"):
            for (replaced, index), life in sorted(self._lives.items()):
                if replaced == role:
                    link.sender.send(Relink(replaced, index, life))

    def _tokenizer_sender(self, index: int) -> Sender:
        return self._sender(f"tokenizer.{index}", "tokenizer_proc", index)

    def _sender(self, name: str, role: Role, index: int) -> Sender:
        return self._pipes.sender(pipe_name(name, self.life(role, index)))
