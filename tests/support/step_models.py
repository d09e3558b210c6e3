"""A made-up device for simulations, on which all times can be told by heart."""

from __future__ import annotations

from simulation.step_model import Coefficients, StepModel


def one_us_a_token(host_us: float = 100.0, **changes: float) -> StepModel:
    """A step of t tokens, padding included, takes 999 + t us, and the host `host_us`. changes: of `Coefficients`."""
    costs = {"sampled_row_us": 0.0, "decode_context_us": 0.0, "prefill_pair_us": 0.0} | changes
    return StepModel(
        Coefficients(
            base_tokens=(1, 2049), base_us=(1000.0, 3048.0), host_rows=(1, 2), host_us=(host_us, host_us), **costs
        )
    )
