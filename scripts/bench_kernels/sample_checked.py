"""Every way to sample at several numbers of rows, for compute-sanitizer to watch; see `sanitize.sh`.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/bench_kernels/sample_checked.py

Kernels are launched one by one, each tensor an allocation of its own, and the tokens are compared with the reference's.
"""

from __future__ import annotations

import sample as bench
import torch

SHAPES = ((1, 151936), (8, 49152), (17, 49152), (64, 128256), (256, 33), (512, 4099))
KINDS = (*bench.KINDS, *bench.MORE_KINDS)


def main() -> None:
    torch.manual_seed(0)
    for rows, vocab in ((1, 300), (3, 40)) if bench.SMOKE else SHAPES:
        bench.VOCAB = vocab
        wrong = [bench.Case(kind, rows, pdl=False).wrong() for kind in KINDS]
        if not bench.SMOKE:
            torch.cuda.synchronize()
        print(f"{rows:>4} rows of {vocab:>6}: wrong {sum(wrong)}", flush=True)


if __name__ == "__main__":
    main()
