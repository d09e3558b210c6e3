"""Which of a GPU's streams work is queued on."""

from __future__ import annotations

import pytest
import torch

from gpu_runner.device.target import make_stream

pytestmark = pytest.mark.gpu


def test_work_runs_on_its_own_stream_and_the_submitter_keeps_its_current_one() -> None:
    device = torch.device("cuda")
    before = torch.cuda.current_stream()
    streams = [make_stream(device) for _ in range(2)]
    seen: list[torch.cuda.Stream] = []
    for stream in (*streams, *streams):
        stream.submit(lambda: seen.append(torch.cuda.current_stream()))
        assert torch.cuda.current_stream() == before
    assert len({stream.cuda_stream for stream in (before, *seen)}) == 3
    assert seen[:2] == seen[2:]


def test_work_that_fails_leaves_the_submitters_stream_current() -> None:
    before = torch.cuda.current_stream()
    stream = make_stream(torch.device("cuda"))

    def fail() -> None:
        raise ValueError("the device broke")

    mark = stream.mark()
    stream.submit(fail)
    mark.record()
    assert torch.cuda.current_stream() == before
    with pytest.raises(ValueError, match="the device broke"):
        mark.wait()
