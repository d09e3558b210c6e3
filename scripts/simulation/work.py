"""What a request costs a replica, estimated from the step model without running any step."""

from __future__ import annotations

from simulation.step_model import StepModel


class WorkModel:
    """Device time that a request takes of a replica which has enough others to fill its steps: a prompt's token costs
    its share of a step that is full of them, an answer's token its share of a step with all rows decoding, and both
    what they attend to. So the work of all requests is what they take together when all are there at once; one that
    runs alone takes longer, because it has its steps to itself.
    """

    def __init__(self, model: StepModel, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        def cost(tokens: int, sampled: int = 0, context: int = 0, pairs: int = 0) -> float:
            return float(model.time_ns(tokens=tokens, sampled=sampled, context=context, pairs=pairs))

        prefill, decode = cost(max_num_batched_tokens), cost(max_num_seqs, sampled=max_num_seqs)
        million = 10**6  # so that nothing is lost in whole ns
        self._prompt_ns = prefill / max_num_batched_tokens
        self._answer_ns = decode / max_num_seqs
        self._pair_ns = (cost(max_num_batched_tokens, pairs=million) - prefill) / million
        self._context_ns = (cost(max_num_seqs, sampled=max_num_seqs, context=million) - decode) / million

    def ns(self, prompt: int, output: int, cached: int = 0) -> int:
        """Of a request of which `cached` tokens of the prompt need not be computed."""
        pairs = (prompt * (prompt + 1) - cached * (cached + 1)) // 2
        return int(
            (prompt - cached) * self._prompt_ns
            + pairs * self._pair_ns
            + output * (self._answer_ns + (prompt + output / 2) * self._context_ns)
        )
