"""Streams of small tokenizers against the library's decode, and the rules that single cases fix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from toy_tokenizers import (
    BYTE_LEVEL_SIZE,
    BYTE_START,
    HIDDEN,
    NAMELESS,
    PIECES,
    SPELLED,
    byte_fallback,
    byte_level,
    metaspace,
    word_pieces,
)

from detokenizer_proc.text_stream import TextStream
from detokenizer_proc.vocabulary import Vocabulary

BYTE_LEVEL = byte_level()
BYTE_VOCABULARY = Vocabulary(BYTE_LEVEL)
FALLBACK = byte_fallback()
FALLBACK_VOCABULARY = Vocabulary(FALLBACK)
METASPACE = metaspace()
METASPACE_VOCABULARY = Vocabulary(METASPACE)
WORD_PIECES = word_pieces()
WORD_PIECE_VOCABULARY = Vocabulary(WORD_PIECES)


def pushed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


def text_of(
    vocabulary: Vocabulary, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = (), tail: int = 8
) -> str:
    prompt_tail = list(prompt)[-tail:]
    stream = vocabulary.open(skip_special_tokens=skip, prompt_tail=prompt_tail, prompt_tokens=len(prompt))
    return "".join(pushed(stream, ids))


def piece_ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def byte_ids(data: bytes) -> list[int]:
    return [BYTE_START + byte for byte in data]


@given(ids=st.lists(st.integers(0, BYTE_LEVEL_SIZE - 1), max_size=24), skip=st.booleans())
def test_any_ids_of_a_byte_level_tokenizer_give_the_librarys_text(ids: list[int], skip: bool) -> None:
    assert BYTE_VOCABULARY.uses_table
    assert text_of(BYTE_VOCABULARY, ids, skip=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=12), cut=st.integers(0, 48))
def test_a_byte_level_text_is_exact_wherever_it_is_cut(text: str, cut: int) -> None:
    ids = list(text.encode())[:cut]
    assert text_of(BYTE_VOCABULARY, ids) == bytes(ids).decode("utf-8", "replace")


def test_no_piece_of_a_split_character_is_shown_before_its_last_byte() -> None:
    stream = BYTE_VOCABULARY.open(skip_special_tokens=True, prompt_tail=(), prompt_tokens=0)
    assert pushed(stream, list("é你😀".encode())) == ["", "é", "", "", "你", "", "", "", "😀", ""]


def test_a_character_that_the_end_cuts_is_one_replacement_sign() -> None:
    assert text_of(BYTE_VOCABULARY, list("ok 😀".encode())[:5]) == "ok \ufffd"


def test_special_tokens_are_hidden_only_on_request_and_other_added_tokens_never() -> None:
    ids = [HIDDEN, ord("a"), SPELLED, HIDDEN]
    assert text_of(BYTE_VOCABULARY, ids, skip=True) == "a<tool>"
    assert text_of(BYTE_VOCABULARY, ids, skip=False) == "<|x|>a<tool><|x|>"


def test_special_tokens_that_are_asked_for_by_name_are_shown() -> None:
    for vocabulary, special in ((BYTE_VOCABULARY, HIDDEN), (METASPACE_VOCABULARY, PIECES.index("<s>"))):
        name = vocabulary.token_bytes(special).decode()
        for shown, expected in (((name, "<y>"), name), (("<y>",), ""), ((), "")):
            stream = vocabulary.open(skip_special_tokens=True, prompt_tail=(), prompt_tokens=0, shown_tokens=shown)
            assert "".join(pushed(stream, [special])) == expected


def test_a_hidden_token_inside_a_character_does_not_break_it() -> None:
    first, *rest = "é".encode()
    assert text_of(BYTE_VOCABULARY, [first, HIDDEN, *rest]) == "é"
    assert text_of(BYTE_VOCABULARY, [first, HIDDEN, *rest], skip=False) == "\ufffd<|x|>\ufffd"


def test_an_id_inside_the_range_that_no_token_has_adds_nothing() -> None:
    assert text_of(BYTE_VOCABULARY, [ord("a"), NAMELESS, ord("b")]) == "ab"


def test_the_prompts_own_cut_character_does_not_reach_the_answer() -> None:
    assert text_of(BYTE_VOCABULARY, [ord("a")], prompt=[0xF0, 0x9F]) == "a"


FALLBACK_UNITS = st.one_of(
    st.sampled_from([[index] for index in range(len(PIECES))]),
    st.characters(codec="utf-8").map(lambda char: byte_ids(char.encode())),
)


@given(units=st.lists(FALLBACK_UNITS, max_size=12), skip=st.booleans())
def test_whole_characters_of_a_byte_fallback_tokenizer_give_the_librarys_text(
    units: list[list[int]], skip: bool
) -> None:
    ids = [token for unit in units for token in unit]
    assert FALLBACK_VOCABULARY.uses_table
    assert text_of(FALLBACK_VOCABULARY, ids, skip=skip) == FALLBACK.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cut_byte_fallback_character_is_one_replacement_sign_a_byte_like_the_librarys(count: int) -> None:
    ids = [*piece_ids("Hello"), *byte_ids("😀".encode()[:count])]
    assert text_of(FALLBACK_VOCABULARY, ids) == "Hello" + "\ufffd" * count == FALLBACK.decode(ids)


def test_a_bad_byte_does_not_take_back_the_good_characters_of_its_run() -> None:
    ids = byte_ids("é".encode() + b"\xff")
    assert text_of(FALLBACK_VOCABULARY, ids) == "é\ufffd"
    assert FALLBACK.decode(ids) == "\ufffd\ufffd\ufffd"


def decoded_after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    return tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (piece_ids("Hello", ","), piece_ids("▁world", "!"), " world!"),
        (piece_ids("<s>", "Hello", ","), piece_ids("▁world", "!"), " world!"),
        ([], piece_ids("▁", "▁Hello"), " Hello"),
        ([], piece_ids("▁Hello"), "Hello"),
        (piece_ids("<s>"), piece_ids("▁Hello", "▁world"), "Hello world"),
        (piece_ids("▁"), piece_ids("▁Hello"), " Hello"),
        ([], piece_ids("▁▁", "Hello"), " Hello"),
    ],
)
def test_a_space_is_dropped_only_where_prompt_and_answer_together_begin(
    prompt: list[int], answer: list[int], text: str
) -> None:
    assert text_of(FALLBACK_VOCABULARY, answer, prompt=prompt) == text
    assert decoded_after(FALLBACK, prompt, answer) == text


def test_a_prompt_longer_than_its_known_tail_has_begun_long_ago() -> None:
    prompt = piece_ids("Hello", "<s>", "<s>")
    assert text_of(FALLBACK_VOCABULARY, piece_ids("▁world"), prompt=prompt, tail=2) == " world"


def test_several_spaces_are_dropped_across_tokens() -> None:
    tokenizer = byte_fallback(strip=2)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.uses_table
    for ids in (piece_ids("▁", "▁", "▁Hello"), piece_ids("▁", "Hello", "▁"), piece_ids("▁", "<s>", "▁▁")):
        assert text_of(vocabulary, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("vocabulary", [METASPACE_VOCABULARY, WORD_PIECE_VOCABULARY])
def test_a_decoder_that_no_table_can_reproduce_is_read_through_a_window(vocabulary: Vocabulary) -> None:
    assert not vocabulary.uses_table


@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=70), skip=st.booleans())
def test_a_windowed_text_is_the_librarys(ids: list[int], skip: bool) -> None:
    assert text_of(METASPACE_VOCABULARY, ids, skip=skip) == METASPACE.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 4), min_size=2, max_size=20), cut=st.integers(1, 19))
def test_a_windowed_answer_continues_its_prompt(ids: list[int], cut: int) -> None:
    prompt, answer = ids[:cut], ids[cut:]
    assert text_of(WORD_PIECE_VOCABULARY, answer, prompt=prompt) == decoded_after(WORD_PIECES, prompt, answer)


def test_a_windowed_text_shows_each_token_at_once() -> None:
    stream = WORD_PIECE_VOCABULARY.open(skip_special_tokens=True, prompt_tail=(), prompt_tokens=0)
    assert pushed(stream, [3, 0, 1, 2, 4]) == ["story", " un", "believ", "able", " .", ""]
