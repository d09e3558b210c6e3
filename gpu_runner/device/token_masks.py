"""Which tokens each slot may get next, in memory that another process writes and the device reads.

The process that follows a row's structure writes the mask of its next token and then says so; until a step has sampled
with it, nobody writes there again, because only the row's next token leads to another mask:

    grammar process   mask of R's token k |                             | mask of R's token k + 1 |
    gpu_runner                            | plan, launch ...   commit k |                         | plan ...
    device                                |   forward | mask, sample k  |                         |

So one mask for each slot does, and none is ever copied: a GPU's kernel reads it from the host's memory.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from gpu_runner.device.pinned import register
from gpu_runner.kernels.mask_layout import mask_words
from gpu_runner.schedule.plan import Int32


class TokenMasks:
    """Bit i of a slot's words, the lowest first, is token i."""

    def __init__(self, *, num_slots: int, vocab: int, pinned: bool) -> None:
        """pinned: whether a GPU is going to read it."""
        self.words = mask_words(vocab)
        size = 4 * num_slots * self.words
        self.fd = os.memfd_create("token-masks")
        """A child may inherit it."""
        os.ftruncate(self.fd, size)
        self.array: Int32 = np.frombuffer(mmap.mmap(self.fd, size), np.int32).reshape(num_slots, self.words)
        self.tensor: Tensor = torch.from_numpy(self.array)
        """Of the same memory; [num_slots, words] int32."""
        self.readable = not pinned or register(self, self.tensor.data_ptr(), size)
        """Whether the device can read them. Where it cannot, as in a container that locks no memory, no row may be
        constrained; nothing else is amiss."""
