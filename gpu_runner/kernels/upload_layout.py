"""Where everything lies in the one int32 buffer that takes a step's plan to the device.

The buffer begins with a header, so that a kernel inside a captured graph finds the sections without the host telling it
where: the counts of the step, then the first word of each section. Sections follow one behind the other, each at an
even word, because 64-bit values lie in some. Plain numbers and numpy: what writes the buffer need not import torch.

    word 0 .. 7     num_rows, num_decode_rows, num_tokens, num_samples, num_starts, num_page_writes, num_bias_writes,
                    num_scores
    word 8 ..       first word of each section, in the order of `Upload`'s fields
    word 37 .. 39   words used in all, words of results that the host wants, which of the host's buffers this is
    word 40 ..      the sections
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import MAX_BIAS_IDS, MAX_STOP_IDS

Int32 = NDArray[np.int32]

SCORE_WORDS = 3
NO_SCORES: Int32 = np.empty((0, SCORE_WORDS), np.int32)
NO_SCORES.flags.writeable = False
HEADER_WORDS = 40
COUNTS = (
    *("num_rows", "num_decode_rows", "num_tokens", "num_samples"),
    *("num_starts", "num_page_writes", "num_bias_writes", "num_scores"),
)
FIRST_OFFSET_WORD = 8
"""Header word that holds the first section's first word."""
USED_WORDS_WORD, RESULT_WORDS_WORD, TURN_WORD = 37, 38, 39
ALIGNMENT_WORDS = 2


class Upload(NamedTuple):
    """What a step uploads, as `gpu_runner.schedule.plan` describes it. R rows, S starting slots, U page-table writes,
    B biased ids of starting slots.

    row_slot, row_start, row_len: of the plan; `row_start` of a decode row is not read, as the device knows better.
    sample_row: the rows that sample, ascending. sample_token: the index of each one's last token among the step's T.
    page_slot, page_index, page_id: of the plan. temperature .. num_bias: of its `StartRows`.
    bias_cell: slot * MAX_BIAS_IDS + index of the id among the slot's. scores: of the plan.
    """

    num_decode_rows: int
    row_slot: Int32  # [R]
    row_start: Int32  # [R]
    row_len: Int32  # [R]
    prefill_tokens: Int32  # [T - num_decode_rows]
    sample_row: Int32  # [N]
    sample_token: Int32  # [N]
    start_slot: Int32  # [S]
    temperature: NDArray[np.float32]  # [S]
    top_k: Int32  # [S]
    top_p: NDArray[np.float32]  # [S]
    min_p: NDArray[np.float32]  # [S]
    seed: NDArray[np.int64]  # [S]
    limit: Int32  # [S]
    min_tokens_until: Int32  # [S]
    stop_ids: Int32  # [S, MAX_STOP_IDS]
    prompt_len: Int32  # [S]
    presence_penalty: NDArray[np.float32]  # [S]
    frequency_penalty: NDArray[np.float32]  # [S]
    repetition_penalty: NDArray[np.float32]  # [S]
    logprobs: Int32  # [S]
    constrained: Int32  # [S]
    num_bias: Int32  # [S]
    bias_cell: Int32  # [B]
    bias_id: Int32  # [B]
    bias_value: NDArray[np.float32]  # [B]
    page_slot: Int32  # [U]
    page_index: Int32  # [U]
    page_id: Int32  # [U]
    scores: Int32 = NO_SCORES  # [N, SCORE_WORDS]


SECTIONS = Upload._fields[1:]
_PAGE_WRITES_WORD = COUNTS.index("num_page_writes")
_PAGE_SLOT_OFFSET, _PAGE_INDEX_OFFSET, _PAGE_ID_OFFSET, _SCORES_OFFSET = (
    FIRST_OFFSET_WORD + SECTIONS.index(name) for name in ("page_slot", "page_index", "page_id", "scores")
)
_HEADER = struct.Struct(f"={TURN_WORD + 1}i")
_WORD = np.dtype(np.int32)


def count_word(name: str) -> int:
    """The header word of one of `COUNTS`."""
    return COUNTS.index(name)


def offset_word(section: str) -> int:
    """The header word that holds where `section` begins."""
    return FIRST_OFFSET_WORD + SECTIONS.index(section)


def upload_words(*, num_slots: int, pages_per_seq: int, max_step_tokens: int) -> int:
    """Words that hold any plan: each slot at most one row, one start and one score in it, each page-table cell at most
    once.

    A multiple of 16, so that the device copies them four at a time.
    """
    rows = num_slots * (3 + 2 + SCORE_WORDS)
    starts = num_slots * (16 + MAX_STOP_IDS + 3 * MAX_BIAS_IDS)
    pages = num_slots * pages_per_seq * 3
    words = HEADER_WORDS + rows + starts + pages + max_step_tokens + len(SECTIONS) * ALIGNMENT_WORDS
    return words + -words % 16


def pack(upload: Upload, buffer: Int32, *, result_words: int = 0, turn: int = 0) -> int:
    """Write header and sections into `buffer`, [upload_words] int32. Returns the number of words used.

    result_words: of the step's results, how many the host wants. turn: which of the host's buffers this is.
    """
    header = [
        len(upload.row_slot),
        upload.num_decode_rows,
        upload.num_decode_rows + len(upload.prefill_tokens),
        len(upload.sample_row),
        len(upload.start_slot),
        len(upload.page_id),
        len(upload.bias_cell),
        len(upload.scores),
    ]
    used = HEADER_WORDS
    sections: tuple[NDArray[Any], ...] = upload[1:]
    for values in sections:
        header.append(used)
        if values.size:
            if values.dtype is not _WORD or values.ndim > 1:
                values = np.ascontiguousarray(values).view(_WORD).reshape(-1)
            end = used + values.size
            buffer[used:end] = values
            used = end + -end % ALIGNMENT_WORDS
    header += [0] * (USED_WORDS_WORD - len(header))
    header += (used, result_words, turn)
    _HEADER.pack_into(buffer.data, 0, *header)
    return used


def replace_pages(page_slot: Int32, page_index: Int32, page_id: Int32, buffer: Int32) -> int:
    """Put other page-table writes, [U] each, into a buffer packed for a step that scores nothing: they lie last in it.
    Returns the number of words used."""
    count = len(page_id)
    room = count + count % ALIGNMENT_WORDS
    first = int(buffer[_PAGE_SLOT_OFFSET])
    second = first + room
    third = second + room
    used = third + room
    buffer[first : first + count] = page_slot
    buffer[second : second + count] = page_index
    buffer[third : third + count] = page_id
    buffer[_PAGE_WRITES_WORD] = count
    buffer[_PAGE_INDEX_OFFSET] = second
    buffer[_PAGE_ID_OFFSET] = third
    buffer[_SCORES_OFFSET] = buffer[USED_WORDS_WORD] = used
    return used
