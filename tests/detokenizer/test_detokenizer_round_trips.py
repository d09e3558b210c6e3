"""Real vocabularies: one id at a time, the streams give what the library's decode gives at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from support.tokenizers_cache import default_model_file, tokenizer_folder
from tokenizers import Tokenizer

from asyncengine.tokenizer_file import load_tokenizer
from detokenizer_proc.byte_table import REPLACE_EACH_BYTE, ByteTable, build_byte_table
from detokenizer_proc.vocabulary import Vocabulary, reproduces, table_text, without_byte_runs

TEXTS = {
    "english": "It's 10:45 a.m.; we'll meet Dr. O'Brien at the caf\u00e9 - don't be late!\n",
    "chinese": "敏捷的棕色狐狸跳过懒狗。龘靐齉爩，𠮷野家。",
    "emoji": "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇺🇳 1️⃣",
    "combining": "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 क्षि ก็ ำ",
    "arabic": "السَّلَامُ عَلَيْكُمْ، كَيْفَ حَالُكَ؟",
    "crlf": "first\r\nsecond\r\n\r\n\tthird  \r\n",
    "code": 'if (a[i] != b->c) {\n\treturn "\\x41<0x41>▁";  // 0xFF\n}\n',
    "spaces": "   three leading, two trailing  ",
}


@dataclass
class Model:
    name: str
    tokenizer: Tokenizer
    table: ByteTable
    vocabulary: Vocabulary

    def streamed(self, ids: list[int], *, skip: bool) -> str:
        stream = self.vocabulary.open(skip_special_tokens=skip, prompt_tail=(), prompt_tokens=0)
        return "".join([*map(stream.push, ids), stream.flush()])


@pytest.fixture(scope="module", params=["smollm2", "qwen3", "llama3_1", "mistral_nemo", "gemma3", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> Model:
    path = default_model_file() if request.param == "smollm2" else tokenizer_folder(request.param)
    tokenizer = load_tokenizer(str(path)).tokenizer
    table = build_byte_table(tokenizer)
    assert table is not None
    return Model(request.param, tokenizer, table, Vocabulary(tokenizer))


def test_the_self_test_accepts_the_byte_table(model: Model) -> None:
    assert model.vocabulary.uses_table
    assert model.vocabulary.size == max(model.tokenizer.get_vocab().values()) + 1


def test_every_text_round_trips_one_id_at_a_time(model: Model) -> None:
    for text in TEXTS.values():
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            assert model.streamed(ids, skip=skip) == model.tokenizer.decode(ids, skip_special_tokens=skip)
        normalizer = model.tokenizer.normalizer
        if model.name != "gemma3":  # its normalizer writes spaces as U+2581, which the text `code` has of its own
            assert model.streamed(ids, skip=True) == (normalizer.normalize_str(text) if normalizer else text)


def test_every_text_is_exact_wherever_it_is_cut(model: Model) -> None:
    for text in TEXTS.values():
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
        if model.table.errors == REPLACE_EACH_BYTE:
            ids = without_byte_runs(model.tokenizer, model.table, ids)
        for end in range(len(ids) + 1):
            expected = model.tokenizer.decode(ids[:end], skip_special_tokens=True)
            assert model.streamed(ids[:end], skip=True) == expected


def test_random_ids_give_the_librarys_text_with_and_without_special_tokens(model: Model) -> None:
    generator = random.Random(2024)
    special = sorted(index for index, token in model.tokenizer.get_added_tokens_decoder().items() if token.special)
    for _ in range(40):
        ids = generator.choices(range(model.table.size), k=40) + generator.choices(special, k=8)
        generator.shuffle(ids)
        if model.table.errors == REPLACE_EACH_BYTE:
            ids = without_byte_runs(model.tokenizer, model.table, ids)
        for skip in (True, False):
            assert model.streamed(ids, skip=skip) == model.tokenizer.decode(ids, skip_special_tokens=skip)


def test_the_self_test_refuses_a_table_with_a_wrong_entry(model: Model) -> None:
    space_or_dot = model.tokenizer.encode("1234567.", add_special_tokens=False).ids[-1]
    pieces = list(model.table.pieces)
    pieces[space_or_dot] = b"?"
    damaged = ByteTable(
        pieces, model.table.visible_pieces, model.table.errors, model.table.strip, model.table.strip_count
    )
    ids = model.tokenizer.encode("1234567.", add_special_tokens=False).ids
    assert table_text(damaged, ids, skip_special_tokens=False).endswith("?")
    assert not reproduces(model.tokenizer, damaged)
