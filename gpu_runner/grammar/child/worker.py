"""What a grammar process does with its messages.

check    CheckGrammar -> compile, first mask -> GrammarChecked. Whatever a request may send is tried here first, and
         nobody but those who wait for a verdict is held up by it.
match    OpenMatch -> a thread compiles or copies, first mask -> MasksReady. AdvanceMatches -> masks -> MasksReady,
         in the main thread, so that a row that begins delays none that runs.
"""

from __future__ import annotations

import os
import resource
from queue import SimpleQueue
from threading import Thread

import numpy as np
from llguidance import LLTokenizer

from asyncengine.config import GrammarConfig
from asyncengine.tokenizer_file import load_tokenizer
from asyncengine.wire.grammar_messages import (
    AdvanceMatches,
    CheckGrammar,
    GrammarChecked,
    GrammarReady,
    MasksReady,
    MatchFailed,
    OpenMatch,
    ToGrammar,
)
from asyncengine.wire.pipes import Pipes, Sender, pipe_name
from gpu_runner.grammar.child.compiler import Compiler, GrammarError, check
from gpu_runner.grammar.child.masks import Masks

MEMORY_BYTES = 8 << 30
"""What wants more ends the process, not the machine."""
MAX_THREADS = 8
IDLE_MS = 1000


def serve(config: GrammarConfig) -> None:
    """Never returns."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    pipes = Pipes(config.run_dir)
    receiver = pipes.receiver(pipe_name(f"grammar.{config.incarnation}", config.life), ToGrammar)
    to_runner = pipe_name("runner.grammar", config.life)
    sender = pipes.sender(to_runner)
    # its last words fill up the masks: the model's vocabulary may be larger than the tokenizer's
    size = config.mask_words * 32 or None
    text = load_tokenizer(config.model_path).tokenizer.to_str()
    compiler = Compiler(LLTokenizer(text, n_vocab=size, eos_token=list(config.eos_ids)))
    worker: Checker | Matcher
    if config.job == "check":
        worker = Checker(config, compiler, sender)
    else:
        worker = Matcher(config, compiler, sender, pipes.sender(to_runner))
    sender.send(GrammarReady(config.incarnation))
    while True:
        receiver.wait(IDLE_MS)
        for message in receiver.drain():
            worker.handle(message)
        sender.flush()


class Checker:
    def __init__(self, config: GrammarConfig, compiler: Compiler, sender: Sender) -> None:
        self._incarnation = config.incarnation
        self._compiler = compiler
        self._sender = sender

    def handle(self, message: ToGrammar) -> None:
        if isinstance(message, CheckGrammar):
            error = self._error(message)
            self._sender.send(GrammarChecked(self._incarnation, message.number, error))

    def _error(self, message: CheckGrammar) -> str:
        try:
            matcher = self._compiler.matcher(message.structured)
            matcher.compute_bitmask()
            check(matcher, message.structured)
        except GrammarError as error:
            return error.message
        return ""


class Matcher:
    def __init__(self, config: GrammarConfig, compiler: Compiler, sender: Sender, opened: Sender) -> None:
        """opened: for the thread that opens rows, which no other may use."""
        self._incarnation = config.incarnation
        self._sender = sender
        self._opened = opened
        self._masks = Masks(
            compiler,
            fd=config.mask_fd,
            num_slots=config.num_slots,
            words=config.mask_words,
            threads=max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2)),
        )
        self._to_open: SimpleQueue[OpenMatch] = SimpleQueue()
        Thread(target=self._open_rows, name="open", daemon=True).start()

    def handle(self, message: ToGrammar) -> None:
        if isinstance(message, OpenMatch):
            self._to_open.put(message)
        elif isinstance(message, AdvanceMatches):
            self._advance(message)

    def _advance(self, message: AdvanceMatches) -> None:
        slots, gens, tokens = (
            np.frombuffer(column, np.int32) for column in (message.slots, message.gens, message.tokens)
        )
        errors = self._masks.advance(slots, gens, tokens)
        if not any(errors):
            self._sender.send(MasksReady(self._incarnation, message.slots, message.gens))
            return
        good = np.array([not error for error in errors])
        if good.any():
            self._sender.send(MasksReady(self._incarnation, slots[good].tobytes(), gens[good].tobytes()))
        for slot, gen, error in zip(slots.tolist(), gens.tolist(), errors, strict=True):
            if error:
                self._sender.send(MatchFailed(self._incarnation, slot, gen, error))

    def _open_rows(self) -> None:
        while True:
            message = self._to_open.get()
            row = (np.array([number], np.int32).tobytes() for number in (message.slot, message.gen))
            try:
                self._masks.open(message.slot, message.gen, message.structured, np.frombuffer(message.tokens, np.int32))
                self._opened.send(MasksReady(self._incarnation, *row))
            except GrammarError as error:
                self._opened.send(MatchFailed(self._incarnation, message.slot, message.gen, error.message))
