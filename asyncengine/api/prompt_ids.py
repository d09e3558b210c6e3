"""The ids of a request's prompts, for an answer that tells them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine.api.backend import Backend, Prompt
from asyncengine.api.patience import Patience
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.errors import InvalidRequestError

MAX_IDS_AT_ONCE = 2**22
"""Of all prompts of a request, times the choices that tell them."""


async def ids_of(backend: Backend, prompts: Sequence[Prompt], *, copies: int) -> list[list[int]]:
    """copies: how often each prompt's ids will be told. Raises `EngineError`."""
    async with Patience(backend.info).beginning():
        told = [
            (await backend.tokenize(prompt)).ids if isinstance(prompt, str | ChatPrompt) else list(prompt)
            for prompt in prompts
        ]
    if (number := sum(map(len, told)) * copies) > MAX_IDS_AT_ONCE:
        raise InvalidRequestError(
            f"the answer would tell {number} ids of its prompts, {copies} times each; it may tell {MAX_IDS_AT_ONCE}: "
            "set return_prompt_token_ids to false",
            code="too_many_token_ids",
            param="return_prompt_token_ids",
        )
    return told
