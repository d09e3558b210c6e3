"""Which requests can run at all, and how long they may become."""

from __future__ import annotations

from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams


def total_tokens(
    *, prompt_len: int, params: SamplingParams, max_tokens: int, context: int, cache_tokens: int, output_len: int = 0
) -> int:
    """Tokens, prompt included, at which the request ends with LENGTH.

    context: most tokens of a sequence. cache_tokens: what the whole KV cache holds. output_len: tokens of output that
    it comes with. A `max_tokens` that the client did not ask for is cut to what fits. Raises InvalidRequestError when
    the request can never run.
    """
    if prompt_len >= context:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens; with at least one token of output the context holds {context}",
            code="context_length_exceeded",
            param="prompt",
        )
    limit = prompt_len + max_tokens
    if params.max_tokens is None:
        limit = min(limit, context, max(cache_tokens + 1, prompt_len + 1))
    if limit > context:
        raise InvalidRequestError(
            f"prompt ({prompt_len} tokens) and max_tokens ({max_tokens}) together exceed the context of {context}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    if limit - 1 > cache_tokens:  # the last token is never computed, so it needs no room
        raise InvalidRequestError(
            f"prompt ({prompt_len} tokens) and max_tokens ({limit - prompt_len}) together need {limit - 1} tokens "
            f"of KV cache, which holds {cache_tokens}",
            code="kv_cache_exceeded",
            param="max_tokens",
        )
    if output_len and prompt_len + output_len >= limit:
        raise InvalidRequestError(
            f"a request that may have {limit - prompt_len} tokens of output cannot go on behind {output_len}",
            param="resume",
        )
    return limit
