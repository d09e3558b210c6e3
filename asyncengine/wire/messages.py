"""Every Struct that crosses a process border, by the pipe that carries it.

Frames are columnar: one Struct per step or batch whose `bytes` fields are little-endian arrays (`int32`, `uint64`,
`uint8`) of one length, so that encoding costs the same at any batch size. All Structs are frozen, array-like and
untracked by the garbage collector; each pipe has one `Decoder` over the union of what it may carry.

    engine -> tokenizer      EncodeText | EncodeIds | EncodeChat | Abort | TokenizeText | TokenizeChat | Detokenize
                             | Relink
    tokenizer -> gpu_runner  Generate | Abort | Relink                     ("requests")
    engine, detokenizer -> gpu_runner  Abort | StopHit                     ("control")
    gpu_runner -> detokenizer          StepFrame
    detokenizer -> engine              Deltas
    tokenizer -> engine                Encoded | Failed | Tokenized | Detokenized
    engine -> engine                   Cancel | Cancelled                 (between API workers)
    gpu_runner -> engine               Failed
    gpu_runner -> grammar process      CheckGrammar | OpenMatch | AdvanceMatches
    grammar process -> gpu_runner      GrammarReady | GrammarChecked | MasksReady | MatchFailed   ("grammar")
    supervisor -> engine               EngineStatus                       (where API workers are processes of their own)
    every sidecar -> supervisor        Progress | Ready | Heartbeat | Fatal
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from asyncengine.config import Role, ToolCallFormat
from asyncengine.sampling import SamplingParams, Structured


class Finish(IntEnum):
    """Why a row ended; 0 while it runs. STOP is an end-of-sequence or stop token id, STOP_STRING a stop string.

    ERROR only leaves the detokenizer: gpu_runner produced a token id that the vocabulary does not have."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    STOP_STRING = 4
    ERROR = 5


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages. That columns agree is checked where a message is read (`checks`), not where it is made."""


# ------------------------------------------------------------------------------------------------ engine -> tokenizer


class Resume(Wire, frozen=True, tag=9):
    """Where choice number `choice` of a request goes on that was lost with a process.

    ids: int32 array, the output it has: it is continued as if it had just produced them. shown: bytes of its text that
    its caller has; the text of `ids` may be less (a token that was computed again) or more (text held back).
    """

    choice: int
    ids: bytes
    shown: int


class EncodeText(Wire, frozen=True, tag=1):
    """Tokenize one prompt and pass it on. `rid` .. `rid + params.n - 1` are the request's choices; or, where `resume`
    is not empty, `rid` .. `rid + len(resume) - 1` are those it names, in its order, and there are no others.

    max_model_len: most tokens of the prompt and its answer, where gpu_runner has room for fewer than the model's
    context; 0 = the latter. The same below.
    """

    rid: int
    text: str
    params: SamplingParams
    namespace: str
    resume: tuple[Resume, ...] = ()
    max_model_len: int = 0


class EncodeIds(Wire, frozen=True, tag=2):
    """A prompt that already is token ids (int32 array); still checked against vocabulary and context length."""

    rid: int
    ids: bytes
    params: SamplingParams
    namespace: str
    resume: tuple[Resume, ...] = ()
    max_model_len: int = 0


class Markup(Wire, frozen=True, tag=8):
    """What the API process needs of an answer's text to take it apart.

    shown_tokens: special tokens whose text is shown though special tokens are skipped. think: the tag that opens a
    block of reasoning, "" for none; where the prompt leaves such a block open, the answer's text begins with the tag,
    and `structured_thinking`, if there is one, takes the place of the parameters' `structured`.
    """

    shown_tokens: tuple[str, ...] = ()
    think: str = ""
    structured_thinking: Structured | None = None


class EncodeChat(Wire, frozen=True, tag=3):
    """A conversation for the chat template: `messages` is the JSON text of a list of {role, content, ...} objects.

    `template_kwargs` (JSON object text, "" for none) become the template's variables; the API process passes only names
    it allows. `tools`: JSON text of a list of functions as the template knows them, "" for none.
    """

    rid: int
    messages: bytes
    params: SamplingParams
    namespace: str
    add_generation_prompt: bool = True
    template_kwargs: bytes = b""
    tools: bytes = b""
    markup: Markup | None = None
    resume: tuple[Resume, ...] = ()
    max_model_len: int = 0


class Abort(Wire, frozen=True, tag=4):
    """The caller is gone: drop `rid` wherever it is. Sent on the control pipe and behind the request itself, so that it
    is found whether the request is still being tokenized or already runs."""

    rid: int


class Relink(Wire, frozen=True, tag=12):
    """Worker `index` of `role` was lost, and `life` is the number of the one in its place: whoever writes to it drops
    what has not left, and connects to the new one's pipe (`pipes.pipe_name`). Goes ahead of whatever was sent again
    because of the loss, on the same pipes; repeated and late ones, whose `life` is not news, are ignored."""

    role: Role
    index: int
    life: int


class TokenizeText(Wire, frozen=True, tag=5):
    """Only say which tokens `text` has; answered with `Tokenized`, or `Failed` for this rid. texts: each token's own
    text too."""

    rid: int
    text: str
    add_special_tokens: bool
    texts: bool
    max_model_len: int = 0


class TokenizeChat(Wire, frozen=True, tag=6):
    """The same for a conversation; fields as in `EncodeChat`."""

    rid: int
    messages: bytes
    add_generation_prompt: bool
    template_kwargs: bytes
    texts: bool
    tools: bytes = b""
    max_model_len: int = 0


class Detokenize(Wire, frozen=True, tag=7):
    """Say which text `ids` (int32 array) have, special tokens included; answered with `Detokenized` or `Failed`."""

    rid: int
    ids: bytes


# ------------------------------------------------------------------------------------------- tokenizer -> gpu_runner


class Generate(Wire, frozen=True, tag=10):
    """One prompt, ready to run.

    ids: int32 array, at least one token. `max_tokens` is resolved (never None) and ids + max_tokens fits the context.
    detok: opaque to gpu_runner; a msgpack `DetokenizeOptions`, emitted with the first token. resume: as in
    `EncodeText`; `max_tokens` counts what the choices have already.
    """

    rid: int
    ids: bytes
    params: SamplingParams
    max_tokens: int
    detok: bytes
    namespace: str
    resume: tuple[Resume, ...] = ()

    @property
    def rids(self) -> range:
        """Of its choices."""
        return range(self.rid, self.rid + (len(self.resume) or self.params.n))


class StopHit(Wire, frozen=True, tag=11):
    """The detokenizer found a stop string in the row that holds `slot` in generation `gen`: end it."""

    slot: int
    gen: int


# ----------------------------------------------------------------------------------------- gpu_runner -> detokenizer


class DetokenizeOptions(Wire, frozen=True, tag=20):
    """How one row's tokens become text. `prompt_tail`: int32 array, the prompt's last ids (context for decoders that
    need some). `logprobs`: the row's tokens come with log-probabilities. `shown_tokens`: as in `Markup`. `prefix`: the
    text begins with it, though no token wrote it. no_output: the row's one token is dropped, as if it had ended with
    LENGTH before it."""

    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    prompt_tail: bytes
    logprobs: bool = False
    shown_tokens: tuple[str, ...] = ()
    prefix: str = ""
    no_output: bool = False


class PromptLogprobs(Wire, frozen=True, tag=23):
    """A prompt's tokens with their log-probabilities: E tokens, each with one item for itself and then those of the
    most likely tokens at its position, falling; I items.

    item_ends: int32 [E], end offset of each token's items. ids: int32 [I]. logprobs: float32 [I], NaN for the prompt's
    first token, which follows nothing and has no other item. ranks: int32 [E], 1 = the most likely token; 0 for the
    first.
    """

    item_ends: bytes
    ids: bytes
    logprobs: bytes
    ranks: bytes


class Open(Wire, frozen=True, tag=21):
    """A row's first appearance, in the same frame as its first token (or as its end, if it ends without one).

    queued_ns, started_ns, first_token_ns: when gpu_runner took it in, first planned it and had its first token; by
    CLOCK_MONOTONIC, 0 = not told. prompt: where the request asks for its log-probabilities. resumed: int32 array,
    output tokens that come before those of the frames and are not sent again; nor are the first `shown` bytes of the
    row's text (see `Resume`).
    """

    slot: int
    gen: int
    rid: int
    detok: bytes
    prompt_tokens: int
    cached_tokens: int
    queued_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    prompt: PromptLogprobs | None = None
    resumed: bytes = b""
    shown: int = 0


MARK_RETRACTED, MARK_TOKEN = 0, -1


class RowMarks(Wire, frozen=True, tag=25):
    """What gpu_runner did for the row in `slot` up to its token in this frame, where it was more than to decode.

    marks: int64 [M, 2], in order: when, by CLOCK_MONOTONIC in ns; and how many tokens of it a step that was planned
    then prefills, or MARK_RETRACTED: it lost its pages, or MARK_TOKEN: it has its token.
    """

    slot: int
    marks: bytes


class StepFrame(Wire, frozen=True, tag=22):
    """What one step produced for one detokenizer shard: R rows, a row at most once.

    slots, gens, tokens: int32 [R]; token -1 where the row ends without a new token (abort).
    finish: uint8 [R], a `Finish`; with STOP the row's token is the stop id itself.
    Log-probabilities, all b"" in a step that none was asked of. logprob_rows: int32 [L], the rows that have them,
    ascending indices below R, each with a token; logprobs: float32 [L], of the row's token. top_ends: int32 [L], end
    offset of each row's most likely tokens in top_ids (int32) and top_logprobs (float32): falling log-probability,
    smaller id first among equals.
    life: of the gpu_runner that sends it. The first frame of each, which may be empty, ends all rows of the one before.
    marks: of rows that have a token.
    """

    step: int
    slots: bytes
    gens: bytes
    tokens: bytes
    finish: bytes
    opens: tuple[Open, ...] = ()
    logprob_rows: bytes = b""
    logprobs: bytes = b""
    top_ends: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    life: int = 0
    marks: tuple[RowMarks, ...] = ()


# --------------------------------------------------------------------------------------------- detokenizer -> engine


class LogprobColumns(Wire, frozen=True, tag=33):
    """Log-probabilities of E tokens of the K requests of a `Deltas`; a token's I items are the chosen one and then the
    most likely ones at its position, falling.

    ends: int32 [K], end offset of each request's tokens. text_offsets: int32 [E], characters of the request's text
    before the token. item_ends: int32 [E], end offset of each token's items, at least one. ids: int32 [I]. logprobs:
    float32 [I]. token_bytes: blob of the items' bytes, `token_ends`: int32 [I], end offset of each.
    """

    ends: bytes
    text_offsets: bytes
    item_ends: bytes
    ids: bytes
    logprobs: bytes
    token_bytes: bytes
    token_ends: bytes


class PromptColumns(Wire, frozen=True, tag=24):
    """The prompt of a request of a `Deltas`, `row` being its place in it. token_bytes: blob of the items' bytes,
    token_ends: int32 [I], end offset of each."""

    row: int
    logprobs: PromptLogprobs
    token_bytes: bytes
    token_ends: bytes


class Openings(Wire, frozen=True, tag=35):
    """Requests of a `Deltas` that appear for the first time. rows: int32 [O], their places in it. stamps: int64 [O, 3],
    `queued_ns`, `started_ns` and `first_token_ns` of each one's `Open`."""

    rows: bytes
    stamps: bytes


class Marks(Wire, frozen=True, tag=26):
    """`RowMarks` of requests of a `Deltas`. rows: int32 [O], their places in it. marks: int64 [M, 2], all requests';
    ends: int32 [O], end offset of each one's."""

    rows: bytes
    ends: bytes
    marks: bytes


class Deltas(Wire, frozen=True, tag=30):
    """New text of K requests of one API worker. A request appears at most once; its deltas arrive in order.

    rids: uint64 [K]. text: UTF-8 blob, `text_ends`: int32 [K], end offset of each request's bytes in it.
    ids: int32 blob of new token ids (all requests'), `ids_ends`: int32 [K], end offset of each in tokens.
    finish: uint8 [K]. stop_reason: int32 [K]; with STOP the token id, with STOP_STRING the index in `stop`, with ERROR
    the id that the vocabulary does not have (not among `ids`), else -1.
    prompt_tokens, cached_tokens: int32 [K].
    logprobs: None unless a request asked. A request's entries belong to its first tokens in order and come with the
    text those tokens began, so they may come later than the token's id, and not at all (see
    `detokenizer_proc.logprob_gate`).
    prompts: of the requests that asked for their prompt's log-probabilities and appear for the first time.
    shard: index of the detokenizer that sends it, which has these rows to their end.
    marks: of the requests for which gpu_runner did more than to decode.
    """

    rids: bytes
    text: bytes
    text_ends: bytes
    ids: bytes
    ids_ends: bytes
    finish: bytes
    stop_reason: bytes
    prompt_tokens: bytes
    cached_tokens: bytes
    logprobs: LogprobColumns | None = None
    openings: Openings | None = None
    prompts: tuple[PromptColumns, ...] = ()
    shard: int = 0
    marks: Marks | None = None


class Encoded(Wire, frozen=True, tag=31):
    """A batch of prompts left tokenizer worker `index` for gpu_runner. rids: uint64 [K]; num_tokens: int32 [K]. at_ns:
    when, by CLOCK_MONOTONIC; 0 = not told."""

    index: int
    rids: bytes
    num_tokens: bytes
    at_ns: int = 0


class Failed(Wire, frozen=True, tag=32):
    """`rid` will produce no text: it was refused before it ran. `status` is 400 for a fault of the request."""

    rid: int
    status: int
    message: str
    code: str
    param: str | None


class Tokenized(Wire, frozen=True, tag=36):
    """ids: int32 array. texts: one for each where asked, as the vocabulary writes them; else none."""

    rid: int
    ids: bytes
    texts: tuple[str, ...]


class Detokenized(Wire, frozen=True, tag=37):
    rid: int
    text: str


class Cancel(Wire, frozen=True, tag=38):
    """API worker `worker`, which has no such request, asks another one to cancel `request_id`, if that has it; answered
    with `Cancelled`. call: the asker's number for this."""

    call: int
    worker: int
    request_id: str


class Cancelled(Wire, frozen=True, tag=39):
    call: int
    found: bool


class EngineStatus(Wire, frozen=True, tag=34):
    """How the engine is, for an API worker, which does not watch the sidecars itself; sent again and again.

    state, detail: as in `engine_info.Health`; "failed" and "closed" end the worker. info: the fields of `EngineInfo`,
    none in these.
    gauges: gpu_runner's latest. lives: of every process that has been replaced and is ready, by "role.index".
    """

    state: str
    detail: str
    info: dict[str, Any]
    gauges: dict[str, int]
    lives: dict[str, int] = {}


# -------------------------------------------------------------------------------------- gpu_runner <-> grammar process


class CheckGrammar(Wire, frozen=True, tag=50):
    """Find out whether `structured` can be compiled, and whether any text matches it. `number` names the answer."""

    number: int
    structured: Structured


class OpenMatch(Wire, frozen=True, tag=51):
    """The row in `slot`, generation `gen`, begins a text of a structure that was checked; whatever was matched in the
    slot before is over. tokens: int32 array, what the row has of the text. Answered by the mask of the next token."""

    slot: int
    gen: int
    structured: Structured
    tokens: bytes


class AdvanceMatches(Wire, frozen=True, tag=52):
    """Each row got a token, none of which ended it: compute the masks of their next ones. int32 arrays [R]."""

    slots: bytes
    gens: bytes
    tokens: bytes


class GrammarReady(Wire, frozen=True, tag=53):
    """The grammar process of that incarnation has loaded the tokenizer and begins to read its pipe."""

    incarnation: int


class GrammarChecked(Wire, frozen=True, tag=54):
    """error: "" if the structure can be used, else one sentence for whoever asked for it."""

    incarnation: int
    number: int
    error: str


class MasksReady(Wire, frozen=True, tag=55):
    """The masks of the next tokens of these rows are in the shared memory. int32 arrays [R]."""

    incarnation: int
    slots: bytes
    gens: bytes


class MatchFailed(Wire, frozen=True, tag=56):
    """The row cannot be continued within its structure, or not within the limits on the work for a token."""

    incarnation: int
    slot: int
    gen: int
    error: str


# ---------------------------------------------------------------------------------------------- sidecar -> supervisor


class Progress(Wire, frozen=True, tag=40):
    """A phase of start-up: `done` of `total` units (bytes while weights load); total 0 = no measure. life: as in
    `SidecarConfig`, here and below: what a dead one said does not count for the one in its place."""

    role: str
    index: int
    phase: str
    done: int
    total: int
    life: int = 0


class Ready(Wire, frozen=True, tag=41):
    """The sidecar serves. `info`: facts for the engine and the start-up report (see `RunnerInfo`, `TokenizerInfo`)."""

    role: str
    index: int
    pid: int
    seconds: float
    info: dict[str, Any]
    life: int = 0


class Heartbeat(Wire, frozen=True, tag=42):
    """Sent by the loop that does the work, so a frozen loop is seen. `gauges`: role-specific integers."""

    role: str
    index: int
    gauges: dict[str, int]
    life: int = 0


class Fatal(Wire, frozen=True, tag=43):
    """The sidecar is about to exit; `message` is one sentence for a person."""

    role: str
    index: int
    message: str
    life: int = 0


ToTokenizer = EncodeText | EncodeIds | EncodeChat | Abort | Relink | TokenizeText | TokenizeChat | Detokenize
ToRunner = Generate | Abort | Relink
ToRunnerControl = Abort | StopHit
ToDetokenizer = StepFrame
ToEngine = Deltas | Encoded | Failed | Tokenized | Detokenized | Cancel | Cancelled | EngineStatus
ToSupervisor = Progress | Ready | Heartbeat | Fatal
ToGrammar = CheckGrammar | OpenMatch | AdvanceMatches
FromGrammar = GrammarReady | GrammarChecked | MasksReady | MatchFailed


class MemoryAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What gpu_runner takes of its device's memory, measured when it was ready. Bytes.

    total: of the GPU; on a CPU, what was available. limit: the most it may use. used: what it does. workspace: buffers
    of a step. context: what the driver and loaded kernels hold. graphs: captured graphs and what they compute in.
    """

    total_bytes: int = 0
    limit_bytes: int = 0
    used_bytes: int = 0
    weight_bytes: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0
    graph_bytes: int = 0
    kv_cache_bytes: int = 0


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`Ready.info` of gpu_runner (convert with `msgspec.convert`).

    num_graphs, num_kernels: captured, and launched by them; 0 on a CPU. kernels_compiled: those that were not in the
    kernel cache.
    """

    device: str
    dtype: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    weight_bytes: int
    kv_cache_bytes: int
    memory: MemoryAccount = MemoryAccount()
    num_graphs: int = 0
    num_kernels: int = 0
    kernels_compiled: int = 0


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`Ready.info` of tokenizer_proc. vocab_size: ids the tokenizer can produce.

    tool_call_format, reasoning: how answers are written, as far as the chat template shows it. tag_tokens: tags of such
    formats that are tokens of their own.
    """

    vocab_size: int
    has_chat_template: bool
    tool_call_format: ToolCallFormat | None = None
    reasoning: bool = False
    tag_tokens: tuple[str, ...] = ()
