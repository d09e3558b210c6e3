"""What is asked: a few dozen requests of all kinds, drawn from a seed, each of which has exactly one right answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.arrivals import Row

Body = dict[str, Any]

SENTENCE = "the sea was calm that morning and nobody had seen a ship for days so they lit a fire on the beach"
UNICODE_SENTENCE = "Grüße 世界 😀 👩‍👩‍👧 नमस्ते é 한국어 שלום 🏳️‍🌈 ﬁn Ω≈ç 𝒳𝒴 ไทย \u200bx naïve"
PLAIN, UNICODE = tuple(SENTENCE.split()), tuple(UNICODE_SENTENCE.split())
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Case:
    """A request whose answer is the same each time. body: without what makes it a stream."""

    number: int
    kind: str
    path: str
    body: Body

    @property
    def may_have_session(self) -> bool:
        """A session is of one prompt."""
        return self.kind != Writer.several_prompts.__name__

    def request(self, *, stream: bool) -> Body:
        """The body to send. Token ids are always asked for, and so is usage."""
        asked = self.body | {"return_token_ids": True}
        return asked | {"stream": True, "stream_options": {"include_usage": True}} if stream else asked


@dataclass(frozen=True)
class Lengths:
    """How the trace's lengths, in tokens, become a case's: divided, and kept within bounds."""

    prompt_divisor: int
    output_divisor: int
    max_prompt: int
    max_output: int

    def of(self, row: Row) -> tuple[int, int]:
        prompt = min(max(row.prompt // self.prompt_divisor, 4), self.max_prompt)
        return prompt, min(max(row.output // self.output_divisor, 4), self.max_output)


class Writer:
    """Makes cases' bodies of a random generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def words(self, count: int, vocabulary: Sequence[str] = PLAIN) -> str:
        return " ".join(self._rng.choice(vocabulary) for _ in range(max(1, count)))

    def greedy(self, prompt: int, output: int) -> Body:
        return {"prompt": self.words(prompt), "max_tokens": output, "temperature": 0}

    def seeded(self, prompt: int, output: int) -> Body:
        return {"prompt": self.words(prompt), "max_tokens": output, "ignore_eos": True, **self.sampling()}

    def penalties(self, prompt: int, output: int) -> Body:
        counted = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
        return self.seeded(prompt, output) | counted | {"min_tokens": output // 2, "logit_bias": {"260": 2}}

    def several_choices(self, prompt: int, output: int) -> Body:
        return self.seeded(prompt, output) | {"n": 2}

    def several_prompts(self, prompt: int, output: int) -> Body:
        return self.greedy(prompt, output) | {"prompt": [self.words(prompt // 2), self.words(4, UNICODE)]}

    def stop_strings(self, prompt: int, output: int) -> Body:
        words = self.words(prompt).split()
        words[len(words) * 2 // 3] = "lighthouse"
        stop = ["lighthouse", "fire on", "\n\n\n"]
        body = {"prompt": " ".join(words), "max_tokens": output, "stop": stop, **self.sampling()}
        return body | {"include_stop_str_in_output": self._rng.random() < 0.5, "ignore_eos": True}

    def unicode(self, prompt: int, output: int) -> Body:
        return {"prompt": self.words(prompt // 3, UNICODE), "max_tokens": output, "ignore_eos": True, "temperature": 0}

    def token_ids(self, prompt: int, output: int) -> Body:
        """Ids whose texts are pieces of characters as often as not."""
        ids = [self._rng.randrange(20, 49000) for _ in range(prompt)]
        return {"prompt": ids, "max_tokens": output, "ignore_eos": True, **self.sampling()}

    def logprobs(self, prompt: int, output: int) -> Body:
        return self.seeded(prompt, output) | {"logprobs": self._rng.randrange(5)}

    def unicode_logprobs(self, prompt: int, output: int) -> Body:
        return self.unicode(prompt, output) | {"logprobs": 2}

    def echo(self, prompt: int, output: int) -> Body:
        return self.seeded(prompt, output) | {"echo": True}

    def chat(self, prompt: int, output: int) -> Body:
        turns = [
            {"role": "system", "content": self.words(3)},
            {"role": "user", "content": self.words(prompt // 2)},
            {"role": "assistant", "content": self.words(3, UNICODE)},
            {"role": "user", "content": self.words(prompt // 4, UNICODE)},
        ]
        return {"messages": turns, "max_tokens": output, "temperature": 0}

    def chat_choices(self, prompt: int, output: int) -> Body:
        return self.chat(prompt, output) | {"n": 2, "stop": ["calm that"], **self.sampling()}

    def chat_logprobs(self, prompt: int, output: int) -> Body:
        return self.chat(prompt, output) | {"logprobs": True, "top_logprobs": 2, **self.sampling()}

    def echo_logprobs(self, prompt: int, output: int) -> Body:
        return self.greedy(prompt, output) | {"echo": True, "logprobs": 1}

    def structured(self, prompt: int, output: int) -> Body:
        regex = r"(north|south) wind, [1-9][0-9]{2,6} ships and (no|one) storm"
        return self.seeded(prompt, output) | {"structured_outputs": {"regex": regex}, "ignore_eos": False}

    def sampling(self) -> Body:
        return {"temperature": self._rng.choice([0.7, 1.0]), "top_p": 0.95, "seed": self._rng.randrange(1 << 62)}


Kind = Callable[[Writer, int, int], Body]
KINDS: tuple[Kind, ...] = (
    Writer.greedy,
    Writer.seeded,
    Writer.several_choices,
    Writer.stop_strings,
    Writer.unicode,
    Writer.chat,
    Writer.logprobs,
    Writer.echo,
    Writer.token_ids,
    Writer.unicode_logprobs,
    Writer.chat_choices,
    Writer.several_prompts,
    Writer.chat_logprobs,
    Writer.penalties,
)
MODEL_KINDS: tuple[Kind, ...] = (Writer.echo_logprobs, *reversed(KINDS), Writer.structured)
"""With those that mean something to a real model only. The last one needs processes of its own, which on busy cores
may take longer to start than a request waits for them: a short run goes without it."""


def make_cases(seed: int, count: int, trace: Sequence[Row], lengths: Lengths, kinds: Sequence[Kind]) -> list[Case]:
    """`count` cases, the kinds by turns."""
    rng = random.Random(f"cases {seed}")
    cases = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        body = kind(Writer(rng), *lengths.of(rng.choice(trace)))
        cases.append(Case(number, kind.__name__, CHAT if "messages" in body else COMPLETIONS, body))
    return cases
