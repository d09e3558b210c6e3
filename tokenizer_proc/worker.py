"""The tokenizer process: takes whatever requests have queued up, tokenizes them as one batch, passes them on.

engine.w  --EncodeText|EncodeIds|EncodeChat|Abort|Relink-->  tokenizer.i  --Generate|Abort|Relink-->  runner.requests
    ^---------------------------- Encoded|Failed ------------------'
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from asyncengine.config import SidecarConfig, worker_key
from asyncengine.errors import InvalidRequestError, StartupError
from asyncengine.tokenizer_file import TokenizerFile, load_tokenizer
from asyncengine.wire.accounting import RingWriter, TurnRecord
from asyncengine.wire.answers import Encoded, Failed
from asyncengine.wire.engine_pipes import ApiProcess, EnginePipes, minter
from asyncengine.wire.pipes import Pipes, pipe_name
from asyncengine.wire.reports import TokenizerInfo
from asyncengine.wire.requests import (
    Abort,
    Detokenize,
    EncodeChat,
    EncodeIds,
    EncodeText,
    Generate,
    Relink,
    TokenizeChat,
    TokenizeText,
    ToTokenizer,
)
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter
from tokenizer_proc.answer_format import tag_tokens, tool_call_format, writes_reasoning
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.prompt_encoder import Job, PromptEncoder, refusal
from tokenizer_proc.pulse import Pulse
from tokenizer_proc.token_service import Question, TokenService
from tokenizer_proc.trial import TURN_CPU_SECONDS, cpu_limit, dangerous
from tokenizer_proc.vocabulary import Vocabulary

TURN_MESSAGES = 512
"""Most messages taken in one turn: bounds the time between heartbeats and what an abort must wait for."""
TURN_BYTES = 4 * 1024 * 1024
"""A turn takes no further message once it has this much text, for the same reason."""
BACKLOG_MESSAGES = 64
"""While gpu_runner is this far behind, nothing new is tokenized: requests wait in their pipe."""
BACKLOG_WAIT_SECONDS = 0.02
REJECTED = InvalidRequestError(
    "the tokenizer crashes on this text, or takes too long over it", code="prompt_rejected", param="prompt"
)


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    """Serve until the process is told to end. Raises `StartupError` when the model's files are of no use."""
    receiver = pipes.receiver(pipe_name(f"tokenizer.{config.index}", config.life), ToTokenizer)
    reporter.progress("load tokenizer")
    file = load_tokenizer(config.model_path)
    vocabulary = Vocabulary(file)
    source = _template_source(config, file)
    template = None
    if source is not None:
        tokens = vocabulary.control_tokens
        template = ChatTemplate(source, special_tokens=file.special_tokens, control_tokens=tokens)
    encoder = PromptEncoder(vocabulary=vocabulary, template=template, max_model_len=_max_model_len(config, file))
    ring = RingWriter(config.run_dir, config.role, config.index, TurnRecord)
    service = TokenService(vocabulary, encoder)

    def report_life(reporter: Reporter = reporter) -> None:
        if reporter.heartbeat_due():
            reporter.heartbeat({**worker.gauges(), "malformed": receiver.malformed})

    # a pipe of its own, for no two threads may share one
    pulse = Pulse(partial(report_life, Reporter(pipes, config.role, config.index, config.life)))
    worker = Worker(
        encoder=encoder,
        service=service,
        pipes=pipes,
        ring=ring,
        runner_life=config.lives.get(worker_key("gpu_runner", 0), 0),
        wary=config.life > 0,
        alive=report_life,
    )
    reporter.ready(
        TokenizerInfo(
            has_chat_template=template is not None,
            tool_call_format=tool_call_format(source or ""),
            reasoning=writes_reasoning(source or ""),
            tag_tokens=tag_tokens(file.tokenizer),
        )
    )
    while True:
        report_life()
        if not worker.flush():
            time.sleep(BACKLOG_WAIT_SECONDS)
        elif receiver.wait(int(HEARTBEAT_SECONDS * 1000)):
            with cpu_limit(TURN_CPU_SECONDS), pulse.turn():
                worker.turn(one_turn(receiver.drain(TURN_MESSAGES)))


def one_turn(messages: Iterator[ToTokenizer]) -> Iterator[ToTokenizer]:
    """The first of `messages`, up to what is enough work for one turn; the rest is left where it is."""
    size = 0
    while size < TURN_BYTES and (message := next(messages, None)) is not None:
        yield message
        match message:
            case EncodeText() | TokenizeText():
                size += len(message.text)
            case EncodeChat() | TokenizeChat():
                size += len(message.messages) + len(message.tools)
            case EncodeIds() | Detokenize():
                size += len(message.ids)


class Worker:
    """One turn at a time: messages in, batch through the encoder, results out in order of arrival.

    gpu_runner is lost and replaced. Front ends send again behind the `Relink` whatever had not ended before it, so all
    that waits for the lost one may be dropped, and must be where it would keep the `Relink` from being read:

    runner.requests    reads  killed                                       runner.requests.1  reads
    engine -> here     1 2 3  4 5 .. 1200      .. 2000  Relink  1' 2' ..
    here -> runner     1 2 3  4 5 .. pipe full, no reader: dropped         1' 2' ..
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        service: TokenService,
        pipes: Pipes,
        ring: RingWriter[TurnRecord],
        runner_life: int = 0,
        wary: bool = False,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """ring: where each turn is recorded. runner_life: of gpu_runner, until a `Relink` tells of another. wary: the
        worker before this one was lost, so what may have been its end is tried first (see `trial`); `alive` is called
        again and again meanwhile."""
        self._wary = wary
        self._alive = alive
        self._ring = ring
        self._encoder = encoder
        self._service = service
        self._pipes = pipes
        self._runner_life = runner_life
        self._runner = pipes.sender(pipe_name("runner.requests", runner_life))
        self._engines = EnginePipes(pipes)
        self._counts = {"requests": 0, "prompt_tokens": 0, "failed": 0, "dropped": 0, "questions": 0}

    def turn(self, messages: Iterable[ToTokenizer]) -> None:
        """Encode and pass on, then answer questions. A request is dropped when all its choices are aborted within the
        same turn; the aborts themselves always go on, behind whatever they may refer to. So is what a lost API process
        has sent, once that is known."""
        begin = time.monotonic_ns()
        arrived: list[Job | Abort | Relink] = []
        questions: list[Question] = []
        for message in messages:
            if isinstance(message, Job | Question) and self._engines.lost(message.rid):
                self._counts["dropped"] += 1
            elif isinstance(message, Question):
                questions.append(message)
            else:
                arrived.append(message)
        aborted = {message.rid for message in arrived if isinstance(message, Abort)}
        jobs = [message for message in arrived if isinstance(message, Job) and not _all_aborted(message, aborted)]
        if self._wary:
            jobs, questions = self._without_dangerous(jobs, questions)
        outcomes = dict(zip((job.rid for job in jobs), self._encoder.encode(jobs), strict=True))
        middle, tokens = time.monotonic_ns(), self._counts["prompt_tokens"]
        encoded: defaultdict[ApiProcess, list[Generate]] = defaultdict(list)
        for message in arrived:
            outcome = outcomes.get(message.rid) if isinstance(message, Job) else message
            if outcome is None:
                self._counts["dropped"] += 1
                continue
            if isinstance(outcome, Failed):
                self._engines.send(outcome.rid, outcome)
                self._counts["failed"] += 1
                continue
            if isinstance(outcome, Relink) and outcome.role == "gpu_runner":
                if outcome.life > self._runner_life:
                    self._connect_runner(outcome.life)
                continue
            if isinstance(outcome, Relink) and outcome.role == "api_worker":
                self._engines.relink(outcome.index, outcome.life)
            self._runner.send(outcome)
            if isinstance(outcome, Generate):
                encoded[minter(outcome.rid)].append(outcome)
        for requests in encoded.values():
            self._report(requests)
        for question in questions:
            self._engines.send(question.rid, self._service.answer(question))
        self._counts["questions"] += len(questions)
        tokens = self._counts["prompt_tokens"] - tokens
        self._ring.write(
            (begin, middle, time.monotonic_ns(), len(arrived) + len(questions), tokens, 0, self._runner.backlog)
        )

    def flush(self) -> bool:
        """Move what waits towards its readers; False while gpu_runner is too far behind to take more. One that is no
        more, or not there yet, is no reason to wait: what it has not read is dropped."""
        self._engines.flush()
        self._runner.flush()
        behind = self._runner.backlog > BACKLOG_MESSAGES
        if behind and not self._pipes.has_reader(pipe_name("runner.requests", self._runner_life)):
            self._connect_runner(self._runner_life)
            return True
        return not behind

    def gauges(self) -> dict[str, int]:
        """Totals since the start, and the requests that wait for gpu_runner now."""
        return {**self._counts, "backlog": self._runner.backlog}

    def _without_dangerous(self, jobs: list[Job], questions: list[Question]) -> tuple[list[Job], list[Question]]:
        """Those that do not bring down a tokenizer; the others are refused. Of requests only those that were sent again
        are tried; of questions all, which do not tell."""
        suspects = [job for job in jobs if job.resume]
        bad: list[Job | Question] = [
            *dangerous(suspects, self._encoder.encode, self._alive),
            *dangerous(questions, lambda asked: [self._service.answer(each) for each in asked], self._alive),
        ]
        for message in bad:
            self._engines.send(message.rid, refusal(message.rid, REJECTED))
        self._counts["failed"] += len(bad)
        rids = {message.rid for message in bad}
        return [job for job in jobs if job.rid not in rids], [each for each in questions if each.rid not in rids]

    def _connect_runner(self, life: int) -> None:
        """From here on requests go to gpu_runner number `life`; those that wait for the one before are lost with it."""
        self._pipes.drop(self._runner)
        self._runner_life = life
        self._runner = self._pipes.sender(pipe_name("runner.requests", life))

    def _report(self, requests: list[Generate]) -> None:
        """Tell the API worker of all of `requests` that they are on their way."""
        rids = array("Q", [request.rid for request in requests])
        self._engines.send(requests[0].rid, Encoded(rids.tobytes(), time.monotonic_ns()))
        self._counts["requests"] += len(requests)
        self._counts["prompt_tokens"] += sum(len(request.ids) for request in requests) // 4


def _all_aborted(job: Job, aborted: set[int]) -> bool:
    choices = len(job.resume) or job.params.n
    return bool(aborted) and all(rid in aborted for rid in range(job.rid, job.rid + choices))


def _max_model_len(config: SidecarConfig, file: TokenizerFile) -> int:
    length = config.engine.max_model_len or file.context_length
    if length is None:
        raise StartupError(f"{config.model_path} does not say the model's context length: set max_model_len")
    return length


def _template_source(config: SidecarConfig, file: TokenizerFile) -> str | None:
    """The operator's chat template, else the model's, else None."""
    if config.engine.chat_template is None:
        return file.chat_template
    try:
        return Path(config.engine.chat_template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the chat template {config.engine.chat_template}: {error}") from error
