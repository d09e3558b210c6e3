"""Fields that clients of OpenAI-compatible servers know and this one does not act on.

One that is given a value which changes nothing is accepted. With any other value it is refused: an answer that
silently ignores it would be wrong. Fields that appear neither here nor in the schema are ignored and reported, unless
they are null, which asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncengine.errors import InvalidRequestError

MAX_NO_EFFECT_BYTES = 64
"""No value of the tables below is longer; a longer one is not even decoded."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "custom_logit_processor": ("",),
    "ebnf": (),
    "ec_transfer_params": ({},),
    "extra_key": ("",),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_path": ("",),
    "no_stop_trim": (False,),
    "regex": (),
    "repetition_detection": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_mm_kwargs": (True, False),
    "return_routed_experts": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ("", []),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
NO_EFFECT_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
}
NO_EFFECT_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "input_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning": ({}, {"exclude": False}),
    "reasoning_effort": (),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "separate_reasoning": (True,),
    "store": (False,),
    "stream_reasoning": (True,),
    "verbosity": (),
    "web_search_options": (),
}
"""Field -> its values, besides null, that change nothing."""
NO_EFFECT_WITHOUT_REASONING: Mapping[str, tuple[Any, ...]] = {
    **NO_EFFECT_IN_CHAT,
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True, False)),
}
"""Those of a chat where reasoning, if there is any, is part of the text: there is none to be told apart."""
INSTEAD: Mapping[str, str] = {
    "bad_words": "logit_bias at -100 bans a token",
    "best_of": "ask for n and choose",
    "ebnf": 'structured_outputs has "grammar"',
    "extra_key": "cache_salt keeps cached prefixes apart",
    "function_call": "tool_choice is its newer form",
    "functions": "tools are their newer form",
    "grammar": 'structured_outputs has "grammar"',
    "guided_choice": 'structured_outputs has "choice"',
    "guided_grammar": 'structured_outputs has "grammar"',
    "guided_json": 'structured_outputs has "json"',
    "guided_regex": 'structured_outputs has "regex"',
    "input_ids": "/v1/completions takes ids as its prompt",
    "json_schema": 'structured_outputs has "json"',
    "no_stop_trim": "include_stop_str_in_output is its name here",
    "reasoning": "chat_template_kwargs sets what the model's own template knows",
    "reasoning_effort": "chat_template_kwargs sets what the model's own template knows",
    "regex": 'structured_outputs has "regex"',
    "return_prompt_text": "return_prompt_token_ids tells its ids, and /detokenize their text",
    "return_tokens_as_token_ids": "return_token_ids tells ids",
    "separate_reasoning": "a server with --reasoning-parser none leaves reasoning in the text",
}
"""What a client that sends such a field is after, and gets by another."""
NO_EFFECT_IN_TOKENIZE: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


def ignored_fields(
    given: Mapping[str, msgspec.Raw], supported: Iterable[str], no_effect: Mapping[str, tuple[Any, ...]]
) -> list[str]:
    """Names in `given` that are unknown here and ask for something. Raises `InvalidRequestError` for a known one that
    would matter."""
    ignored = []
    for name in sorted(given.keys() - supported):
        if name not in no_effect:
            if not _changes_nothing(given[name], ()):
                ignored.append(name)
        elif not _changes_nothing(given[name], no_effect[name]):
            instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise InvalidRequestError(
                f"{name} is not supported by this server{instead}", code="unsupported_parameter", param=name
            )
    return ignored


def _changes_nothing(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    if len(memoryview(raw)) > MAX_NO_EFFECT_BYTES:
        return False
    value = msgspec.json.decode(raw)
    if value is None:
        return True
    # JSON's true is not its 1, though Python's is
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values)
