"""The closed loop that was measured on a GPU, simulated with the step models that are not fitted to it."""

from __future__ import annotations

from pathlib import Path

import compare_serving
import pytest
from simulation.serving import serve
from support.step_models import one_us_a_token

MODELS = Path(compare_serving.__file__).parent / "step_models"


@pytest.mark.parametrize("name", ["h200-qwen3-0.6b", "h200-llama-3.1-8b"])
def test_steps_of_serving_take_as_long_as_measured(name: str) -> None:
    rows = compare_serving.compared(MODELS / f"{name}.json")
    assert [row["streams"] for row in rows] == [64, 256, 512]
    assert max(abs(row["error_percent"]) for row in rows) < 8
    simulated, measured = ([row[which].prompt_tokens_per_step for row in rows] for which in ("simulated", "measured"))
    assert simulated == pytest.approx(measured, rel=0.05)


def test_as_many_requests_end_in_the_steps_of_an_answer_as_there_are_streams() -> None:
    model = one_us_a_token(host_us=0.0, decode_context_us=0.01)
    served = serve(model, streams=8, prompt_tokens=16, answer_tokens=64, max_num_batched_tokens=2048)
    assert served.prompt_tokens_per_step == 8 * 16 / 64
    # steps of about 8 tokens, whose rows attend to 48 tokens on average
    assert served.step_ms == pytest.approx(1.007 + 8 * 48 * 1e-5, rel=0.01)
