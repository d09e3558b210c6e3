"""What is asked of the ring: by the engine of the tokenizers, by them of gpu_runner, and by any of it to stop."""

from __future__ import annotations

from asyncengine.config import Role
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.wire.base import Wire

PROVEN_TOKENS = 16
"""A choice that has had so many tokens more than it had when gpu_runner crashed is not what crashed it there. More than
the tokens that may have been computed but lost with the process."""


class Resume(Wire, frozen=True, tag=9):
    """Where choice number `choice` of a request goes on that was lost with a process.

    ids: int32 array, the output it has: it is continued as if it had just produced them. shown: bytes of its text that
    its caller has; the text of `ids` may be less (a token that was computed again) or more (text held back).
    trial_tokens: it may be what crashes gpu_runner, and is to have so many more tokens there alone, for a trial, before
    all others go on; 0 = it is no suspect.
    """

    choice: int
    ids: bytes
    shown: int
    trial_tokens: int = 0


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
    terms: Terms = DEFAULT_TERMS


class EncodeIds(Wire, frozen=True, tag=2):
    """A prompt that already is token ids (int32 array); still checked against vocabulary and context length."""

    rid: int
    ids: bytes
    params: SamplingParams
    namespace: str
    resume: tuple[Resume, ...] = ()
    max_model_len: int = 0
    terms: Terms = DEFAULT_TERMS


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
    continue_final_message: the prompt ends within the last message, and `add_generation_prompt` does not count.
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
    terms: Terms = DEFAULT_TERMS
    continue_final_message: bool = False


class Abort(Wire, frozen=True, tag=4):
    """The caller is gone: drop `rid` wherever it is. Sent on the control pipe and behind the request itself, so that it
    is found whether the request is still being tokenized or already runs."""

    rid: int


class Relink(Wire, frozen=True, tag=12):
    """Worker `index` of `role` was lost, and `life` is the number of the one in its place: whoever writes to it drops
    what has not left, and connects to the new one's pipe (`pipes.pipe_name`); of a lost API worker all that it asked
    for ends, besides. Goes ahead of whatever was sent again because of the loss, or by the new one, on the same pipes;
    repeated and late ones, whose `life` is not news, are ignored."""

    role: Role
    index: int
    life: int


class ReleaseSession(Wire, frozen=True, tag=13):
    """Keep the prefix of `tenant`'s session no longer; unknown ones are ignored. On the control pipe."""

    tenant: str
    session: str


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
    continue_final_message: bool = False


class Detokenize(Wire, frozen=True, tag=7):
    """Say which text `ids` (int32 array) have, special tokens included; answered with `Detokenized` or `Failed`."""

    rid: int
    ids: bytes


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
    terms: Terms = DEFAULT_TERMS

    @property
    def rids(self) -> range:
        """Of its choices."""
        return range(self.rid, self.rid + (len(self.resume) or self.params.n))


class StopHit(Wire, frozen=True, tag=11):
    """The detokenizer found a stop string in the row that holds `slot` in generation `gen`: end it."""

    slot: int
    gen: int


ToTokenizer = EncodeText | EncodeIds | EncodeChat | Abort | Relink | TokenizeText | TokenizeChat | Detokenize
ToRunner = Generate | Abort | Relink
ToRunnerControl = Abort | ReleaseSession | StopHit
