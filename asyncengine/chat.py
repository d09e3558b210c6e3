"""A conversation in the terminal, with an engine of its own or with one behind a server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module

import uvloop

from asyncengine.chat_backends import Backend, Generate
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.delta import Delta
from asyncengine.errors import EngineDeadError, EngineError
from asyncengine.sampling import SamplingParams

# What a model writes must not steer the terminal: control characters other than newline and tab are dropped.
CONTROL_CHARACTERS = {code: None for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
DIM, PLAIN = "\033[2m", "\033[0m"
HELP = "Ctrl-C stops an answer; /clear forgets the conversation; /exit or Ctrl-D leaves."


@dataclass
class Answer:
    """What is known of an answer while it is written. Times in seconds of the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, delta: Delta) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.pieces.append(delta.text)
        self.tokens = delta.completion_tokens

    def summary(self) -> str:
        """How fast it came, as far as that can be said."""
        if self.first is None:
            return "no answer"
        parts = [f"first token after {self.first - self.started:.2f} s", f"{self.tokens} tokens"]
        if self.tokens > 1 and self.last > self.first:
            parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        return ", ".join(parts)


class Chat:
    """Reads lines, prints answers. The event loop runs only while an answer is awaited, so that the line editor and
    Ctrl-C work as they do in any program."""

    def __init__(self, backend: Backend, params: SamplingParams, *, system: str | None = None) -> None:
        self._backend = backend
        self._params = params
        self._system: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
        self._messages = [*self._system]

    def run(self) -> int:
        """Converse until the user leaves; returns the exit code. Raises `StartupError`."""
        with contextlib.suppress(ImportError):
            import_module("readline")  # importing it gives `input` line editing and history
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stack = contextlib.AsyncExitStack()
            model, generate = runner.run(stack.enter_async_context(self._backend))
            try:
                _say_dimly(f"{model}. {HELP}")
                return self._converse(runner, generate)
            finally:
                runner.run(stack.aclose())

    def _converse(self, runner: asyncio.Runner, generate: Generate) -> int:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                _say_dimly(f"\n{HELP}")
                continue
            match line:
                case "":
                    continue
                case "/exit":
                    return 0
                case "/clear":
                    self._messages = [*self._system]
                    continue
            try:
                self._turn(runner, generate, line)
            except EngineDeadError as error:
                print(f"asyncengine: {error.message}", file=sys.stderr)
                return 1
            except EngineError as error:
                self._messages.pop()
                print(f"asyncengine: {error.message}", file=sys.stderr)

    def _turn(self, runner: asyncio.Runner, generate: Generate, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        answer = Answer()
        stopped = ""
        try:
            runner.run(self._print_answer(generate, answer))
        except KeyboardInterrupt:
            stopped = "stopped; "
        self._messages.append({"role": "assistant", "content": answer.text})
        _say_dimly(f"\n{stopped}{answer.summary()}")

    async def _print_answer(self, generate: Generate, answer: Answer) -> None:
        prompt = ChatPrompt(messages=self._messages)
        async with contextlib.aclosing(generate(prompt, self._params)) as deltas:
            async for delta in deltas:
                answer.add(delta)
                sys.stdout.write(delta.text.translate(CONTROL_CHARACTERS))
                sys.stdout.flush()


def _say_dimly(text: str) -> None:
    print(f"{DIM}{text}{PLAIN}" if sys.stdout.isatty() else text, flush=True)
