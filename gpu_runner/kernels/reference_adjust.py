"""What changes a row's logits before a token is chosen from them, and what is reported of them, in plain torch: what a
CPU runs and what `sample_full` is tested against.

Adjusted, in this order, as in vLLM and OpenAI's API:

1.  logit bias: x += value for the row's biased ids.
2.  repetition penalty r (Keskar et al., 2019), on ids that occur in prompt or output: x / r where x > 0, else x * r.
3.  frequency penalty: x -= penalty * how often the id occurs in the output.
4.  presence penalty: x -= penalty where the id occurs in the output.
5.  the mask of the row's structure: x = -inf where it does not have the id (`mask`).

Log-probabilities are of the logits as the model gave them, before all of that: natural logarithms of their softmax. NaN
counts as -inf and +inf as the largest float32, as in `reference_sampling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_runner.kernels.reference_sampling import without_nan


@dataclass(frozen=True, slots=True)
class AdjustRows:
    """Parameters of S rows, on the logits' device; integers int32."""

    presence_penalty: Tensor  # [S] float32, 0 = off
    frequency_penalty: Tensor  # [S] float32, 0 = off
    repetition_penalty: Tensor  # [S] float32, 1 = off
    num_bias: Tensor  # [S]
    bias_ids: Tensor  # [S, M], the first num_bias of a row's are distinct
    bias_values: Tensor  # [S, M] float32
    prompt_len: Tensor  # [S]
    length: Tensor  # [S], tokens of the sequence so far


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of S rows. chosen: the token's. ids, values: the first `count` of a row are its most likely tokens, by falling
    log-probability, the smaller id first among equals; what follows means nothing."""

    chosen: Tensor  # [S] float32
    count: Tensor  # [S] int32
    ids: Tensor  # [S, K] int32
    values: Tensor  # [S, K] float32


def adjust(logits: Tensor, tokens: Tensor, rows: AdjustRows) -> Tensor:
    """logits: [S, vocab] float32. tokens: [S, L], each row's first `length` are its sequence, prompt and output.

    Ids outside the vocabulary have no effect. Returns a new tensor.
    """
    vocab = logits.shape[1]
    lane = torch.arange(rows.bias_ids.shape[1], device=logits.device)
    biased = (lane < rows.num_bias[:, None]) & (rows.bias_ids >= 0) & (rows.bias_ids < vocab)
    bias_at = torch.where(biased, rows.bias_ids, 0).to(torch.int64)
    x = logits.scatter_add(1, bias_at, torch.where(biased, rows.bias_values, 0.0))

    position = torch.arange(tokens.shape[1], device=logits.device)
    known = (position < rows.length[:, None]) & (tokens >= 0) & (tokens < vocab)
    is_output = known & (position >= rows.prompt_len[:, None])
    at = torch.where(known, tokens, 0).to(torch.int64)
    zero = torch.zeros_like(logits, dtype=torch.int32)
    occurs = zero.scatter_add(1, at, known.to(torch.int32)) > 0
    output_count = zero.scatter_add(1, at, is_output.to(torch.int32))

    repetition = torch.where(occurs, rows.repetition_penalty[:, None], 1.0)
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - rows.frequency_penalty[:, None] * output_count.to(torch.float32)
    return x - torch.where(output_count > 0, rows.presence_penalty[:, None], 0.0)


def mask(logits: Tensor, masks: Tensor, constrained: Tensor) -> Tensor:
    """logits: [S, vocab] float32. masks: [S, W] int32; bit i of a row, the lowest of a word first, is id i.
    constrained: [S] bool, whether the row has a mask. Returns a new tensor."""
    lane = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks[:, :, None] >> lane) & 1).flatten(1)[:, : logits.shape[1]] != 0
    return torch.where(allowed | ~constrained[:, None], logits, -math.inf)


def ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """[S] int32: the places, from 1, of the tokens `chosen`, [S], among all by falling logit, the smaller id first
    among equals. logits: [S, vocab] float32."""
    x = without_nan(logits)
    ids, chosen = torch.arange(x.shape[1], device=x.device), chosen.to(torch.int64)[:, None]
    own = x.gather(1, chosen)
    before = (x > own) | ((x == own) & (ids < chosen))
    return before.sum(dim=1).to(torch.int32) + 1


def top_logprobs(logits: Tensor, chosen: Tensor, wanted: Tensor, *, most: int) -> TopLogprobs:
    """logits: [S, vocab] float32, the model's own. chosen: [S], the tokens. wanted: [S], most likely tokens to report,
    up to `most`; ids of no probability are never among them."""
    x = without_nan(logits)
    vocab = x.shape[1]
    normaliser = x.logsumexp(dim=1, keepdim=True)
    # One integer to order by: the float's bits, with those of negative ones turned round, then ids from the largest.
    bits = (x + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) * 2**32
    order += torch.arange(vocab - 1, -1, -1, device=x.device)
    size = min(most, vocab)
    ids = order.topk(size, dim=1).indices
    values = x.gather(1, ids)
    count = torch.minimum((values > -math.inf).sum(dim=1).to(torch.int32), wanted.to(torch.int32))
    all_ids = torch.full((len(x), most), -1, dtype=torch.int32, device=x.device)
    all_values = torch.full((len(x), most), -math.inf, device=x.device)
    all_ids[:, :size], all_values[:, :size] = ids.to(torch.int32), values - normaliser
    own = x.gather(1, chosen.to(torch.int64)[:, None])
    return TopLogprobs(
        chosen=torch.where(own > -math.inf, own - normaliser, -math.inf)[:, 0],
        count=count,
        ids=all_ids,
        values=all_values,
    )
