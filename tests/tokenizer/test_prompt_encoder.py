"""What a batch of requests becomes: checked ids in order, or a refusal that says what was wrong."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from support.tokenizers_cache import NAMES, tokenizer_folder
from tokenizers import Tokenizer

from asyncengine.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from asyncengine.wire.answers import Failed
from asyncengine.wire.frames import DetokenizeOptions
from asyncengine.wire.requests import EncodeChat, EncodeIds, EncodeText, Generate
from tokenizer_proc.prompt_encoder import Job, PromptEncoder

TEXTS = {
    "english": "The quick brown fox, it's 42.5% done - don't you think?",
    "chinese": "今天天气很好，我们去公园吧。",
    "zwj emoji": "👨‍👩‍👧‍👦 and 🏳️‍🌈 at 100%",
    "combining marks": "e\u0301 a\u0308 Z\u0337\u0322\u031ba\u0335",
    "arabic": "مرحبا بالعالم، كيف الحال؟",
    "crlf": "one\r\ntwo\r\n\r\n\tthree  \r\n",
    "code": "def f(x: int) -> str:\n    return f\"{x!r:>8}\\n\" if x >= 10_000 else '<|>'\n",
    "nul": "AB\0CD",
}
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture
def encoder(loaded: Callable[[str], Any]) -> PromptEncoder:
    """SmolLM2 (no BOS, 49152 ids) with a context of 64 tokens."""
    return encoder_for(loaded("smollm2"), 64)


def encoder_for(model: Any, max_model_len: int) -> PromptEncoder:
    return PromptEncoder(vocabulary=model.vocabulary, template=model.template, max_model_len=max_model_len)


@cache
def library_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_folder(name) / "tokenizer.json"))


def text_job(text: str, params: SamplingParams = PARAMS, rid: int = 7) -> EncodeText:
    return EncodeText(rid, text, params, "space")


def ids_job(ids: list[int], params: SamplingParams = PARAMS, rid: int = 7) -> EncodeIds:
    return EncodeIds(rid, np.array(ids, dtype=np.int32).tobytes(), params, "space")


def chat_job(content: Any, rid: int = 7, **fields: Any) -> EncodeChat:
    return EncodeChat(rid, json.dumps([{"role": "user", "content": content, **fields}]).encode(), PARAMS, "space")


def ids_of(outcome: Generate | Failed) -> list[int]:
    assert isinstance(outcome, Generate), outcome
    return list(np.frombuffer(outcome.ids, dtype=np.int32).tolist())


def refusal(encoder: PromptEncoder, job: Job) -> Failed:
    (outcome,) = encoder.encode([job])
    assert isinstance(outcome, Failed), outcome
    assert (outcome.rid, outcome.status) == (7, 400)
    return outcome


@pytest.mark.parametrize("name", ["smollm2", *NAMES])
def test_text_of_every_kind_goes_through_equal_to_the_librarys_own_encoding(
    loaded: Callable[[str], Any], name: str
) -> None:
    model = loaded(name)
    outcomes = encoder_for(model, 4096).encode([text_job(text) for text in TEXTS.values()])
    library = model.file.tokenizer if name == "smollm2" else library_tokenizer(name)
    bos = [0] if name == "deepseek_v3" else []  # asked for by its tokenizer_config.json, not by its tokenizer.json
    for text, outcome in zip(TEXTS.values(), outcomes, strict=True):
        assert ids_of(outcome) == bos + library.encode(text).ids
        expected = unicodedata.normalize("NFC", text) if name == "qwen3" else text
        assert library.decode(ids_of(outcome), skip_special_tokens=True) == expected


def test_a_mixed_batch_comes_back_in_order_with_each_fault_in_its_place(encoder: PromptEncoder) -> None:
    jobs: list[Job] = [
        text_job("one", rid=1),
        chat_job("two", rid=2),
        ids_job([5, 6], rid=3),
        text_job("", rid=4),
        ids_job([5, -1], rid=5),
        chat_job(None, rid=6),
        chat_job("<|im_end|>", rid=7),
        text_job("four", rid=8),
    ]
    outcomes = encoder.encode(jobs)
    assert [outcome.rid for outcome in outcomes] == list(range(1, 9))
    assert [type(outcome).__name__[0] for outcome in outcomes] == list("GGGFFFGG")
    alone = [encoder.encode([job])[0] for job in jobs]
    assert alone == outcomes
    assert encoder.encode([]) == []


def test_a_request_carries_its_parameters_and_the_options_for_its_text(encoder: PromptEncoder) -> None:
    params = SamplingParams(stop=("END",), skip_special_tokens=False, include_stop_str_in_output=True, n=2)
    (outcome,) = encoder.encode([ids_job(list(range(100, 120)), params)])
    assert isinstance(outcome, Generate)
    assert (outcome.rid, outcome.params, outcome.namespace, outcome.max_tokens) == (7, params, "space", 44)
    options = msgspec.msgpack.decode(outcome.detok, type=DetokenizeOptions)
    assert options == DetokenizeOptions(("END",), False, True, np.arange(112, 120, dtype=np.int32).tobytes())


def test_a_short_prompt_is_its_own_tail(encoder: PromptEncoder) -> None:
    (outcome,) = encoder.encode([ids_job([3, 4])])
    assert isinstance(outcome, Generate)
    options = msgspec.msgpack.decode(outcome.detok, type=DetokenizeOptions)
    assert options.prompt_tail == np.array([3, 4], dtype=np.int32).tobytes()


def test_a_chat_ends_with_the_generation_prompt_only_if_asked(encoder: PromptEncoder) -> None:
    with_prompt = chat_job("hi")
    without = EncodeChat(7, with_prompt.messages, PARAMS, "space", add_generation_prompt=False)
    longer, shorter = (ids_of(outcome) for outcome in encoder.encode([with_prompt, without]))
    assert longer == [*shorter, 1, 520, 9531, 198]  # <|im_start|>assistant\n


@pytest.mark.parametrize("job", [text_job(""), ids_job([])])
def test_an_empty_prompt_is_refused(encoder: PromptEncoder, job: Job) -> None:
    failed = refusal(encoder, job)
    assert (failed.code, failed.param) == ("empty_prompt", "prompt")
    assert failed.message == "the prompt is empty: it has no tokens"


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_bos(loaded: Callable[[str], Any]) -> None:
    (outcome,) = encoder_for(loaded("llama3_1"), 64).encode([text_job("")])
    assert ids_of(outcome) == [128000]


@pytest.mark.parametrize(
    ("ids", "value", "place"), [([5, -1], -1, 1), ([49152], 49152, 0), ([1, 2, 2**31 - 1], 2**31 - 1, 2)]
)
def test_ids_outside_the_vocabulary_are_refused_naming_position_and_value(
    encoder: PromptEncoder, ids: list[int], value: int, place: int
) -> None:
    failed = refusal(encoder, ids_job(ids))
    assert (failed.code, failed.param) == ("invalid_token_id", "prompt")
    assert failed.message == (
        f"token id {value} at position {place} of the prompt is outside the vocabulary (0 to 49151)"
    )


def test_bytes_that_are_no_ids_are_refused(encoder: PromptEncoder) -> None:
    assert "32-bit integers" in refusal(encoder, EncodeIds(7, b"abc", PARAMS, "")).message


def test_a_bias_of_a_token_outside_the_vocabulary_is_refused(encoder: PromptEncoder) -> None:
    failed = refusal(encoder, ids_job([5], SamplingParams(logit_bias=((49151, 1.0), (49152, 1.0)))))
    assert (failed.status, failed.code, failed.param) == (400, "invalid_token_id", "logit_bias")
    assert failed.message == "logit_bias has 49152, which is outside the vocabulary (0 to 49151)"


@pytest.mark.parametrize(("logprobs", "asked"), [(None, False), (0, True), (20, True)])
def test_the_detokenizer_is_told_of_log_probabilities(
    encoder: PromptEncoder, logprobs: int | None, asked: bool
) -> None:
    (generate,) = encoder.encode([ids_job([5], SamplingParams(logprobs=logprobs))])
    assert isinstance(generate, Generate)
    assert msgspec.msgpack.decode(generate.detok, type=DetokenizeOptions).logprobs is asked


def test_stop_token_ids_outside_the_vocabulary_are_refused(encoder: PromptEncoder) -> None:
    failed = refusal(encoder, ids_job([5], SamplingParams(stop_token_ids=(2, 49152))))
    assert (failed.code, failed.param) == ("invalid_token_id", "stop_token_ids")
    assert "49152" in failed.message


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [
        (63, 1, None),
        (60, 4, None),
        (63, None, None),
        (64, 1, ("64", "64")),
        (60, 10, ("60", "10", "70", "64")),
        (70, None, ("70", "64")),
    ],
)
def test_the_context_length_holds_prompt_and_answer_or_the_refusal_has_the_numbers(
    encoder: PromptEncoder, length: int, max_tokens: int | None, numbers: tuple[str, ...] | None
) -> None:
    job = ids_job([5] * length, SamplingParams(max_tokens=max_tokens))
    if numbers is None:
        (outcome,) = encoder.encode([job])
        assert isinstance(outcome, Generate)
        assert outcome.max_tokens == (max_tokens or 64 - length)
    else:
        failed = refusal(encoder, job)
        assert failed.code == "context_length_exceeded"
        assert [word for word in failed.message.replace(",", "").split() if word.isdigit()] == list(numbers)


@pytest.mark.parametrize(
    ("job", "param"),
    [
        (ids_job([5] * 32, SamplingParams(max_tokens=1)), "prompt"),
        (ids_job([5] * 30, SamplingParams(max_tokens=3)), "max_tokens"),
        (ids_job([5] * 30, SamplingParams(min_tokens=3)), "min_tokens"),
        (text_job("word " * 500), "prompt"),
        (chat_job("word " * 500), "messages"),
    ],
)
def test_a_context_that_the_kv_cache_cuts_short_is_the_one_that_counts(
    encoder: PromptEncoder, job: Job, param: str
) -> None:
    failed = refusal(encoder, msgspec.structs.replace(job, max_model_len=32))
    assert (failed.code, failed.param) == ("context_length_exceeded", param)
    assert failed.message.endswith("the context length is the 32 tokens that the KV cache holds")
    (outcome,) = encoder.encode([msgspec.structs.replace(ids_job([5] * 30, SamplingParams()), max_model_len=32)])
    assert isinstance(outcome, Generate)
    assert outcome.max_tokens == 2


def test_min_tokens_beyond_the_context_length_is_refused(encoder: PromptEncoder) -> None:
    failed = refusal(encoder, ids_job([5] * 60, SamplingParams(min_tokens=5)))
    assert (failed.code, failed.param) == ("context_length_exceeded", "min_tokens")


@pytest.mark.parametrize("letter", ["a", " ", "_", "😀", "e\u0301"])
def test_a_text_far_too_long_is_refused_by_its_beginning(
    encoder: PromptEncoder, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = encoder._vocabulary._encode

    def spy(texts: list[str], **options: Any) -> Any:
        seen.extend(map(len, texts))
        return original(texts, **options)

    monkeypatch.setattr(encoder._vocabulary, "_encode", spy)
    for job, param in ((text_job(letter * 2_000_000), "prompt"), (chat_job(letter * 2_000_000), "messages")):
        failed = refusal(encoder, job)
        assert (failed.code, failed.param) == ("context_length_exceeded", param)
        assert "64 tokens" in failed.message
    assert max(seen, default=0) <= 16 * 64


def test_a_long_text_of_few_tokens_is_not_refused_by_its_length(loaded: Callable[[str], Any]) -> None:
    model = loaded("qwen3")
    text = " " * 128 * 40  # one token for 128 spaces and more
    (outcome,) = encoder_for(model, 128).encode([text_job(text)])
    assert ids_of(outcome) == model.file.tokenizer.encode(text).ids


def test_a_chat_without_a_template_is_refused(loaded: Callable[[str], Any]) -> None:
    encoder = PromptEncoder(vocabulary=loaded("smollm2").vocabulary, template=None, max_model_len=64)
    failed = refusal(encoder, chat_job("hi"))
    assert (failed.code, failed.param) == ("no_chat_template", "messages")
    assert "no chat template" in failed.message


def test_chat_parts_that_are_not_text_are_refused(encoder: PromptEncoder) -> None:
    failed = refusal(encoder, chat_job([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]))
    assert (failed.code, failed.param) == ("invalid_value", "messages")


def test_only_the_text_that_the_tokenizer_cannot_take_fails(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            if "bad" in texts:
                raise Exception("from the library")  # noqa: TRY002 - what the library raises
            return self._tokenizer.encode_batch_fast(texts, **options)

    monkeypatch.setattr(encoder._vocabulary, "_tokenizer", Picky(encoder._vocabulary._tokenizer))
    outcomes = encoder.encode([text_job("good"), text_job("bad"), text_job("good")])
    assert ids_of(outcomes[0]) == ids_of(outcomes[2])
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].message == "the prompt cannot be tokenized"


def test_a_prompt_alone_runs_for_one_token_that_is_not_shown(encoder: PromptEncoder) -> None:
    (message,) = encoder.encode([text_job("a b", SamplingParams(max_tokens=0))])
    assert isinstance(message, Generate)
    assert message.max_tokens == 1
    assert msgspec.msgpack.decode(message.detok, type=DetokenizeOptions).no_output


def test_the_log_probabilities_of_a_prompt_are_bounded(loaded: Callable[[str], Any]) -> None:
    encoder = encoder_for(loaded("smollm2"), 10_000)
    most = MAX_PROMPT_LOGPROBS // (16 * 4)
    params = SamplingParams(max_tokens=1, n=16, prompt_logprobs=3)
    jobs = [EncodeIds(1, np.full(size, 5, np.int32).tobytes(), params, "") for size in (most, most + 1)]
    fits, refused = encoder.encode(jobs)
    assert isinstance(fits, Generate)
    assert isinstance(refused, Failed)
    assert (refused.status, refused.code, refused.param) == (400, "too_many_logprobs", "prompt_logprobs")
    assert f"its {most + 1} tokens" in refused.message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("character", ["a", " ", "_", "😀"])
def test_megabytes_of_one_character_are_refused_unread(
    loaded: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, name: str, character: str
) -> None:
    vocabulary = loaded(name).vocabulary
    monkeypatch.setattr(vocabulary, "count_tokens", None)
    monkeypatch.setattr(vocabulary, "encode_prompts", lambda texts: [None for text in texts])
    encoder = PromptEncoder(vocabulary=vocabulary, template=None, max_model_len=8192)
    text = character * (8_000_000 // len(character.encode()))
    short = EncodeText(2, "short", SamplingParams(), "")
    refused, other = encoder.encode([EncodeText(1, text, SamplingParams(), ""), short])
    assert isinstance(refused, Failed)
    assert (refused.rid, refused.status, refused.code) == (1, 400, "context_length_exceeded")
    assert re.match(r"the prompt of 8000000 bytes has at least \d{5} tokens, but", refused.message)
    assert isinstance(other, Failed)
    assert (other.rid, other.message) == (2, "the prompt cannot be tokenized")
