from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device_harness import Rig, make_rig


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = make_rig(torch.device(request.param))
    yield rig
    rig.executor.close()
