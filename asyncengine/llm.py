"""An engine for programs without an event loop: hand over a batch of prompts, get back the answers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from asyncengine.batch import Prompt, run_batch
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.config import EngineConfig, Role
from asyncengine.engine import AsyncEngine
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.loop_thread import LoopThread
from asyncengine.outputs import RequestOutput
from asyncengine.prompt_messages import unpacked
from asyncengine.request_terms import AskedTerms, resolve_terms
from asyncengine.sampling import SamplingParams
from asyncengine.startup_progress import StartupProgress

Message = dict[str, object]


class LLM:
    """An engine inside this process: `with LLM("default", max_num_seqs=64) as llm: llm.generate(...)`.

    It has a thread and an event loop of its own, so it can be used from anywhere: plain scripts, notebooks, several
    threads, or a running event loop (which it blocks). It is closed by `close`, at the end of `with`, when nobody
    refers to it any longer, or with the interpreter.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        progress: StartupProgress | None = None,
        modules: Mapping[Role, str] | None = None,
        **engine_options: Any,
    ) -> None:
        """engine_options: fields of `EngineConfig`. progress, modules: as in `AsyncEngine.start`.

        Raises `StartupError`, and then leaves nothing behind.
        """
        self._config = EngineConfig(model=model, **engine_options)
        self._engine = AsyncEngine.start(self._config, progress=progress, modules=modules)
        self._loop = LoopThread("asyncengine-llm")
        # there before the engine starts: an interrupt may come at any moment
        self._finalizer = weakref.finalize(self, _close, self._loop, self._engine)
        try:
            self._loop.run(self._engine.__aenter__())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine: what still runs raises `EngineDeadError` where it was called; no process is left.
        Idempotent."""
        self._finalizer()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **terms: Unpack[AskedTerms],
    ) -> list[RequestOutput]:
        """One answer for each prompt, in their order. prompts: texts, lists or arrays of token ids, or a single one.

        sampling_params: for all prompts, or one for each. use_tqdm: show a progress bar on stderr. terms: see
        `AskedTerms`; of all prompts, and with a session there is one.

        What is known to be wrong at once (an empty prompt, ids that do not fit into the context, half a surrogate pair)
        raises `InvalidRequestError` naming the prompt before anything is queued. What shows only later (a text that
        turns out too long) is the `error` of that prompt's answer, and the others go on. Raises `EngineDeadError`.
        KeyboardInterrupt cancels everything; the engine can be used again.
        """
        prompts = unpacked(prompts)
        if isinstance(prompts, str) or (isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], int)):
            return self._run([prompts], sampling_params, use_tqdm, terms)  # type: ignore[list-item]
        return self._run(prompts, sampling_params, use_tqdm, terms)  # type: ignore[arg-type]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, object] | None = None,
        tools: list[dict[str, object]] | None = None,
        **terms: Unpack[AskedTerms],
    ) -> list[RequestOutput]:
        """As `generate`, of conversations: each a list of {"role": ..., "content": ...}, or a single one.

        The model's chat template makes prompts of them. continue_final_message: each conversation's last message is the
        beginning of the answer. Answers are text as the model writes it: reasoning and calls of
        `tools` are in it.
        """
        single = isinstance(messages, list | tuple) and len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        if not isinstance(messages, list | tuple) or not all(isinstance(each, list | tuple) for each in conversations):
            raise InvalidRequestError(
                "messages must be one conversation, which is a list of messages, or a list of conversations",
                param="messages",
            )
        prompts = [
            ChatPrompt(
                messages=list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
                tools=tools or [],
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm, terms)

    def release_session(self, session: str) -> None:
        """As `AsyncEngine.release_session`."""
        self._loop.run(self._engine.release_session(session))

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        asked: AskedTerms,
    ) -> list[RequestOutput]:
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise InvalidRequestError(
                f"prompts must be one prompt or a list of them, got {type(prompts).__name__}", param="prompts"
            )
        prompts = [unpacked(prompt) for prompt in prompts]
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, Sequence):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, or a list of them, got {sampling_params!r}",
                param="sampling_params",
            )
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(sampling_params)} sampling_params; give one for all or one "
                "for each",
                param="sampling_params",
            )
        terms = resolve_terms({**asked}, default_class=self._config.default_service_class)
        if terms.session and len(prompts) > 1:
            raise InvalidRequestError(f"with a session there can be one prompt; got {len(prompts)}", param="session")
        work = run_batch(
            self._engine,
            prompts,
            sampling_params,
            asked,
            max_num_seqs=self._config.max_num_seqs,
            show_progress=use_tqdm,
        )
        return self._loop.run(work)


def _close(loop: LoopThread, engine: AsyncEngine) -> None:
    if loop.is_forked:  # the engine is the other process's, and goes on
        return
    if loop.is_current:  # the garbage collector may run anywhere, and this thread cannot wait for its own end
        threading.Thread(target=_close, args=(loop, engine)).start()
        return
    try:
        loop.run(engine.close())
    finally:
        loop.close()
