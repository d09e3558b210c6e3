"""What a device remembers of each slot between steps, so that a step needs nothing that the host does not know yet."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine.config import MAX_BIAS_IDS, MAX_STOP_IDS


class DeviceState:
    """Persistent tensors by slot, allocated once. Only work on the executor's stream may touch them."""

    def __init__(self, *, num_slots: int, pages_per_seq: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.page_table = zeros(num_slots, pages_per_seq)  # page ids in order of position; 0 = dummy
        self.last_token = zeros(num_slots)
        self.kv_len = zeros(num_slots)  # tokens in the KV cache, which is the next token's position
        self.done = zeros(num_slots, dtype=torch.bool)
        self.temperature = zeros(num_slots, dtype=torch.float32)
        self.top_k = zeros(num_slots)
        self.top_p = zeros(num_slots, dtype=torch.float32)
        self.min_p = zeros(num_slots, dtype=torch.float32)
        self.seed = zeros(num_slots, dtype=torch.int64)
        self.limit = zeros(num_slots)  # tokens, prompt and output
        self.min_tokens_until = zeros(num_slots)  # token index below which stop ids cannot be sampled
        self.stop_ids = zeros(num_slots, MAX_STOP_IDS)  # -1 pads
        self.prompt_len = zeros(num_slots)  # tokens before the first of the output
        self.presence_penalty = zeros(num_slots, dtype=torch.float32)
        self.frequency_penalty = zeros(num_slots, dtype=torch.float32)
        self.repetition_penalty = zeros(num_slots, dtype=torch.float32)  # 1 = off
        self.logprobs = zeros(num_slots)  # most likely tokens to report beside the chosen one; -1 = report nothing
        self.constrained = zeros(num_slots)  # 1: only tokens in the slot's mask may be sampled
        self.num_bias = zeros(num_slots)
        self.bias_ids = zeros(num_slots, MAX_BIAS_IDS)  # the first `num_bias` of a slot's are distinct token ids
        self.bias_values = zeros(num_slots, MAX_BIAS_IDS, dtype=torch.float32)
