"""Many prompts through an engine at once, answers in the order of the prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import tqdm

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.delta import Delta
from asyncengine.engine import AsyncEngine
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from asyncengine.outputs import RequestOutput, assemble
from asyncengine.prompt_messages import check_params, prompt_message
from asyncengine.request_terms import AskedTerms
from asyncengine.sampling import SamplingParams
from asyncengine.terms import DEFAULT_TERMS

Prompt = str | Sequence[int] | ChatPrompt

REQUESTS_UNDER_WAY = 2048
"""At least so many are handed to the engine, whose policy then chooses among them; the rest wait here."""
PROMPT_BYTES_UNDER_WAY = 64 * 1024 * 1024
"""What their prompts may take in the pipes; requests that can run at once are under way whatever they take."""
RETRY_SECONDS = 0.01


async def run_batch(
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    terms: AskedTerms,
    *,
    max_num_seqs: int,
    show_progress: bool,
) -> list[RequestOutput]:
    """One answer for each prompt. params: one for each prompt. terms: of all. max_num_seqs: the engine's.

    Raises `InvalidRequestError` naming the prompt before anything is queued, where that can be known without its
    tokens; what is found out later is the `error` of that prompt's answer. Raises `EngineDeadError`. Cancelling it
    aborts everything.
    """
    longest = await _check(engine, prompts, params)
    most = max(REQUESTS_UNDER_WAY, 4 * max_num_seqs)
    lanes = max(max_num_seqs, min(most, PROMPT_BYTES_UNDER_WAY // max(1, longest)))
    answers: list[RequestOutput | None] = [None] * len(prompts)
    indices = iter(range(len(prompts)))

    async def lane(progress: Progress) -> None:
        for index in indices:
            answer = answers[index] = await _answer(engine, prompts[index], params[index], terms)
            progress.add(answer)

    bar = tqdm.tqdm(total=len(prompts), desc="requests", unit="req", dynamic_ncols=True, disable=not show_progress)
    with bar:
        progress = Progress(bar)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(lanes, len(prompts))):
                    group.create_task(lane(progress))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [answer for answer in answers if answer is not None]


async def _check(engine: AsyncEngine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> int:
    """Raise for the first prompt that is known to be wrong; returns the largest one's size in bytes."""
    room = engine.info.max_model_len
    empty_text_is_something: bool | None = None
    largest = 0
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        name = f"prompts[{index}]"
        check_params(wanted)
        try:
            _, size = prompt_message(0, prompt, wanted, "", DEFAULT_TERMS, info=engine.info)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name}: {error.message}", code=error.code, param=name) from None
        largest = max(largest, size)
        if prompt == "":
            if empty_text_is_something is None:
                empty_text_is_something = bool((await engine.tokenize("")).ids)
            if not empty_text_is_something:
                raise InvalidRequestError(f"{name} is empty: it has no tokens", code="empty_prompt", param=name)
        elif not isinstance(prompt, str | ChatPrompt) and len(prompt) + (wanted.max_tokens or 1) > room:
            raise InvalidRequestError(
                f"{name} has {len(prompt)} tokens; with {wanted.max_tokens or 1} of output they do not fit into the "
                f"context length of {room} tokens",
                code="context_length_exceeded",
                param=name,
            )
    return largest


async def _answer(engine: AsyncEngine, prompt: Prompt, params: SamplingParams, terms: AskedTerms) -> RequestOutput:
    """The answer, be it an error. Waits while the engine has no room. Raises `EngineDeadError`."""
    text, ids = prompt if isinstance(prompt, str) else None, None
    while True:
        try:
            if ids is None:
                text, ids = await _tokens(engine, prompt)
            return assemble(await _deltas(engine, ids, params, terms), prompt=text, prompt_token_ids=ids)
        except OverloadedError:
            await asyncio.sleep(RETRY_SECONDS)
        except EngineDeadError:
            raise
        except EngineError as error:
            return RequestOutput(prompt=text, prompt_token_ids=ids, outputs=[], error=error)


async def _tokens(engine: AsyncEngine, prompt: Prompt) -> tuple[str | None, list[int]]:
    """The prompt's text, None if it was given as ids, and its ids."""
    if isinstance(prompt, str):
        return prompt, (await engine.tokenize(prompt)).ids
    if isinstance(prompt, ChatPrompt):
        ids = (await engine.tokenize(prompt)).ids
        return await engine.detokenize(ids), ids
    return None, list(prompt)


async def _deltas(engine: AsyncEngine, ids: list[int], params: SamplingParams, terms: AskedTerms) -> list[Delta]:
    """One for each choice, with all of it: nobody is woken before the last choice has ended."""
    ended = asyncio.get_running_loop().create_future()

    def hear() -> None:
        if stream.ended and not ended.done():
            ended.set_result(None)

    stream = engine.subscribe(ids, params, listener=hear, **terms)
    try:
        await ended
        deltas = stream.take()
        if len(deltas) < params.n or any(delta.finish_reason is None for delta in deltas):
            stream.take()  # nothing is left but the error that ended it
        return deltas
    finally:
        stream.close()


class Progress:
    """Has a bar tell the requests done, and tokens a second in and out."""

    def __init__(self, bar: tqdm.tqdm) -> None:
        self._bar = bar
        self._start = time.monotonic()
        self._prompt_tokens = self._output_tokens = self._failed = 0

    def add(self, answer: RequestOutput) -> None:
        self._failed += answer.error is not None
        if answer.error is None:
            self._prompt_tokens += len(answer.prompt_token_ids or ())
            self._output_tokens += sum(len(output.token_ids) for output in answer.outputs)
        self._bar.set_postfix_str(", ".join(self._speeds(time.monotonic() - self._start)), refresh=False)
        self._bar.update()

    def _speeds(self, seconds: float) -> Iterator[str]:
        yield f"in {self._prompt_tokens / seconds:,.0f} tok/s"
        yield f"out {self._output_tokens / seconds:,.0f} tok/s"
        if self._failed:
            yield f"{self._failed} failed"
