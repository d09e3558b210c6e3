"""A stand-in for the engine: answers by script, and remembers what it was asked and who left early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Unpack

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.delta import Delta
from asyncengine.engine_info import EngineInfo, Health
from asyncengine.errors import EngineError, InvalidRequestError
from asyncengine.logprobs import PromptLogprob, TokenLogprob, TopLogprob
from asyncengine.metrics import COUNTERS, HISTOGRAMS, HistogramTotals, Totals
from asyncengine.prompt_messages import TokenizedPrompt
from asyncengine.request_terms import TenantTerms, check_session, resolve_terms
from asyncengine.sampling import SamplingParams
from asyncengine.terms import Terms
from asyncengine.timeline import Timeline

MODEL = "org/fake-model"
VOCAB_SIZE = 1000
PIECES = ("Hel", "", "lo ", "👩‍👧", '\n"x"\\')
ANSWER = "".join(PIECES)


class FakeBackend:
    """Every choice yields `pieces`, one token each, its own number put before the first unless it is not `numbered`;
    then it ends with "stop", or with "length" at `max_tokens`. Prompts are counted by character, id or message; all but
    one token are cached.

    Asked for log-probabilities, token number `k` has -k/2, and the most likely ones are those before it. Each character
    or id of a prompt is a token, of rank 2; token number `k` has -k/4, behind a token that starts a text.

    names: namespace and request id of each call; terms: what it asks for. session: `session_tokens` and
    `first_differing_token` of every choice. cancelled, released: with the tenant that asked. timeline: of every choice.
    A token is a byte of text; cancelling succeeds for a completion.

    refusal: raised at the first iteration. failure: raised after `fail_after` deltas. hold_after: after so many deltas
    of a stream, wait until the stream is closed.
    """

    def __init__(self) -> None:
        self.info = EngineInfo(
            model=MODEL,
            model_path="/nowhere",
            architecture="llama",
            device="cpu",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=4096,
            num_pages=1,
            weight_bytes=1,
            kv_cache_bytes=1,
            has_chat_template=True,
            tool_call_format="hermes",
        )
        self.run_dir: Path | None = None
        self.numbered = True
        self.health = Health(state="ready")
        self.pieces: Sequence[str] = PIECES
        self.refusal: EngineError | None = None
        self.failure: Exception | None = None
        self.fail_after = 0
        self.hold_after: int | None = None
        self.finish: tuple[str, int | str | None] = ("stop", None)
        self.calls: list[tuple[str | Sequence[int] | ChatPrompt, SamplingParams]] = []
        self.timeline: Timeline | None = None
        self.names: list[tuple[str, str]] = []
        self.terms: list[Terms] = []
        self.session: tuple[int | None, int | None] = (None, None)
        self.cancelled: list[tuple[str, str]] = []
        self.released: list[tuple[str, str]] = []
        self.completed = 0
        self.left_early = 0

    def gauges(self) -> dict[str, int]:
        return {"running": 2, "waiting": 3, "open_streams": self.open}

    def totals(self) -> Totals:
        histograms = {
            name: HistogramTotals(bounds, (0,) * (len(bounds) + 1), 0.0) for name, bounds in HISTOGRAMS.items()
        }
        return Totals(dict.fromkeys(COUNTERS, 7), histograms)

    @property
    def open(self) -> int:
        return len(self.calls) - self.completed - self.left_early

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str = "",
        **terms: Unpack[TenantTerms],
    ) -> AsyncGenerator[Delta, None]:
        params = params or SamplingParams()
        self.calls.append((prompt, params))
        self.names.append((namespace, request_id))
        try:
            self.terms.append(resolve_terms(terms, default_class="interactive"))
            size = self._check(prompt)
            await asyncio.sleep(0)
            sent = 0
            for step, piece in enumerate(self.pieces):
                for index in range(params.n):
                    if self.failure is not None and sent == self.fail_after:
                        raise self.failure
                    if sent == self.hold_after:
                        await asyncio.Event().wait()
                    text = f"{index}:{piece}" if step == 0 and self.numbered else piece
                    yield self._delta(index, text, step + 1, size, params, prompt)
                    sent += 1
                if step + 1 == params.max_tokens or params.max_tokens == 0:
                    break
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.left_early += 1
            raise
        except Exception:
            self.completed += 1
            raise
        self.completed += 1

    def subscribe(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        listener: Callable[[], None],
        namespace: str = "",
        request_id: str = "",
        **terms: Unpack[TenantTerms],
    ) -> FakeSubscription:
        params = params or SamplingParams()
        deltas = self.generate(prompt, params, namespace=namespace, request_id=request_id, **terms)
        return FakeSubscription(deltas, n=params.n, listener=listener)

    async def cancel(self, request_id: str, *, tenant: str = "") -> bool:
        self.cancelled.append((tenant, request_id))
        return request_id.startswith("cmpl-")

    async def release_session(self, session: str, *, tenant: str = "") -> None:
        check_session(session)
        self.released.append((tenant, session))

    async def tokenize(
        self, prompt: str | ChatPrompt, *, add_special_tokens: bool = True, texts: bool = False
    ) -> TokenizedPrompt:
        if self.refusal is not None:
            raise self.refusal
        text = prompt if isinstance(prompt, str) else str(prompt.messages[0]["content"])
        ids = [1] * add_special_tokens + list(text.encode())
        return TokenizedPrompt(ids, [chr(token) for token in ids] if texts else None)

    async def detokenize(self, ids: Sequence[int]) -> str:
        if ids:
            self._check(ids)
        return bytes(token % 256 for token in ids).decode(errors="replace")

    def _delta(
        self,
        index: int,
        text: str,
        count: int,
        size: int,
        params: SamplingParams,
        prompt: str | Sequence[int] | ChatPrompt,
    ) -> Delta:
        if params.max_tokens == 0:
            return Delta(
                index=index,
                text="",
                token_ids=[],
                prompt_tokens=size,
                cached_tokens=0,
                completion_tokens=0,
                finish_reason="length",
                prompt_logprobs=self._prompt(prompt, params.prompt_logprobs),
            )
        finish: str | None = None
        stop_reason: int | str | None = None
        if count == len(self.pieces):
            finish, stop_reason = self.finish
        elif count == params.max_tokens:
            finish = "length"
        return Delta(
            index=index,
            text=text,
            token_ids=[100 + count],
            prompt_tokens=size,
            cached_tokens=size - 1,
            session_tokens=self.session[0],
            first_differing_token=self.session[1],
            completion_tokens=count,
            finish_reason=finish,
            stop_reason=stop_reason,
            timeline=None if finish is None else self.timeline,
            prompt_logprobs=self._prompt(prompt, params.prompt_logprobs) if count == 1 else None,
            logprobs=[] if params.logprobs is None else [self._logprob(index, text, count, params.logprobs)],
        )

    def _prompt(self, prompt: str | Sequence[int] | ChatPrompt, num_top: int | None) -> list[PromptLogprob] | None:
        if num_top is None:
            return None
        text = (
            "[chat]"
            if isinstance(prompt, ChatPrompt)
            else prompt
            if isinstance(prompt, str)
            else bytes(prompt).decode()
        )
        start = PromptLogprob(token_id=1, token=b"<s>", logprob=None, rank=None, text_offset=0)
        return [
            start,
            *(
                PromptLogprob(
                    token_id=200 + k,
                    token=char.encode(),
                    logprob=-k / 4,
                    rank=2,
                    text_offset=2 + k,
                    top=tuple(TopLogprob(300 + t, f"t{t}".encode(), -k / 8 - t) for t in range(num_top)),
                )
                for k, char in enumerate(text, start=1)
            ),
        ]

    def _logprob(self, index: int, text: str, count: int, num_top: int) -> TokenLogprob:
        before = "".join(self.pieces[: count - 1])
        return TokenLogprob(
            token_id=100 + count,
            token=text.encode(),
            logprob=-count / 2,
            text_offset=len(f"{index}:{before}") if count > 1 else 0,
            top=tuple(TopLogprob(100 + k, str(k).encode(), -k / 2) for k in range(num_top)),
        )

    def _check(self, prompt: str | Sequence[int] | ChatPrompt) -> int:
        if self.refusal is not None:
            raise self.refusal
        if isinstance(prompt, ChatPrompt):
            return len(prompt.messages)
        if len(prompt) == 0:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        for position, token in enumerate(prompt):
            if isinstance(token, int) and token >= VOCAB_SIZE:
                raise InvalidRequestError(
                    f"prompt[{position}] is {token}, the vocabulary has {VOCAB_SIZE}", param="prompt"
                )
        return len(prompt)


class FakeSubscription:
    """Calls the listener once for all deltas made at once, and makes no more than `n` before they are taken."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], *, n: int, listener: Callable[[], None]) -> None:
        self._n = n
        self._listener = listener
        self._news: list[Delta] = []
        self._error: Exception | None = None
        self._room = asyncio.Event()
        self._pump = asyncio.create_task(self._run(deltas))

    @property
    def over(self) -> bool:
        return not self._news and self._pump.done()

    @property
    def pending_bytes(self) -> int:
        return sum(len(delta.text.encode()) for delta in self._news)

    def take(self) -> list[Delta]:
        if not self._news and self._error is not None:
            raise self._error
        news, self._news = self._news, []
        self._room.set()
        return news

    def close(self) -> None:
        self._pump.cancel()

    async def _run(self, deltas: AsyncGenerator[Delta, None]) -> None:
        self._pump.add_done_callback(lambda _: self._pump.cancelled() or self._listener())
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    if not self._news:
                        asyncio.get_running_loop().call_soon(self._listener)
                    self._news.append(delta)
                    while len(self._news) == self._n:
                        self._room.clear()
                        await self._room.wait()
        except Exception as error:  # noqa: BLE001 - raised again by `take`
            self._error = error
