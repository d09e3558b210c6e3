"""What a chat request says about tools, and what follows from it for the prompt, the answer and its structure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from asyncengine.api.answer_grammar import AnswerGrammar, Function, Thinking
from asyncengine.api.request_messages import ClientsOwn
from asyncengine.config import ToolCallFormat
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import MAX_STRUCTURED_BYTES, Structured

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$(?!\n)"

FunctionName = Annotated[str, Meta(pattern=FUNCTION_NAME)]
ObjectSchema = Annotated[dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"const": "object"}}})]


class FunctionJson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """parameters: a JSON schema of an object; without one the function takes none. strict: calls of it keep to that
    schema though the model chooses freely whether to call."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=MAX_STRUCTURED_BYTES)] | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = None


class ToolJson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionJson
    cache_control: ClientsOwn = UNSET


class NamedFunctionJson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName


class ToolChoiceJson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunctionJson


Tools = Annotated[list[ToolJson], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ToolChoiceJson


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The functions that an answer may call: at least one. required: it must call. named: this one. parallel: more
    than one call. Construction by `tool_use` only."""

    tools: Sequence[ToolJson]
    required: bool
    named: str | None
    parallel: bool

    def template_tools(self) -> list[dict[str, object]]:
        """What the model is told of."""
        return template_tools(self.tools)

    @property
    def free(self) -> bool:
        """Whether to call is the model's choice."""
        return not self.required and self.named is None

    def structured(
        self, format: ToolCallFormat, *, think: Thinking, tokens: Collection[str], schema: dict[str, Any] | None
    ) -> Structured | None:
        """What makes an answer keep to the request, None where any text does. tokens: tags that are tokens of the
        model. schema: of the answer where there are no calls, None for any text. Raises `InvalidRequestError`."""
        free = self.free
        if schema is None and free and self.parallel and not any(tool.function.strict for tool in self.tools):
            return None
        functions = [
            Function(function.name, _schema(function, keep=bool(function.strict) or not free))
            for function in (tool.function for tool in self.tools)
            if self.named in (None, function.name)
        ]
        several = self.parallel and self.named is None
        text = AnswerGrammar(format, tokens=tokens).of_calls(
            functions, free=free, several=several, think=think, schema=schema
        )
        if (size := len(text.encode())) > MAX_STRUCTURED_BYTES:
            raise InvalidRequestError(
                f"the functions' schemas are too large to keep calls to them: {size} bytes as a grammar, "
                f"{MAX_STRUCTURED_BYTES} are allowed",
                param="tools",
            )
        return Structured("grammar", text)


def tool_use(
    tools: Sequence[ToolJson] | None, choice: ToolChoice | None, parallel: bool | None, format: ToolCallFormat | None
) -> ToolUse | None:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` come to; None for an answer without calls, whose
    model is not told of any function either. format: the model's, if it is known. Raises `InvalidRequestError`."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools to choose from", param="tool_choice")
        return None
    _check_functions(tools)
    named = choice.function.name if isinstance(choice, ToolChoiceJson) else None
    if named is not None and named not in {tool.function.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice names {named!r}, which is none of the tools", param="tool_choice")
    if choice == "none":
        return None
    if format is None:
        raise InvalidRequestError(
            "how this model writes tool calls is not known: its chat template shows no format that is supported; start "
            "the server with --tool-call-parser",
            code="unsupported_parameter",
            param="tools",
        )
    return ToolUse(tools=tools, required=choice == "required", named=named, parallel=parallel is not False)


def template_tools(tools: Sequence[ToolJson]) -> list[dict[str, object]]:
    """Checked tools in the form in which chat templates expect them. Raises `InvalidRequestError`."""
    _check_functions(tools)
    return [{"type": "function", "function": _template_function(tool.function)} for tool in tools]


def _check_functions(tools: Sequence[ToolJson]) -> None:
    names: set[str] = set()
    for place, tool in enumerate(tools):
        where = f"tools[{place}].function"
        name, parameters = tool.function.name, tool.function.parameters
        if name in names:
            raise InvalidRequestError(f"{where}.name {name!r} is that of an earlier tool", param=f"{where}.name")
        names.add(name)
        if parameters is None:
            continue
        where = f"{where}.parameters"
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError(f'{where}.type must be "object"', param=f"{where}.type")
        if deeper_than(parameters, MAX_SCHEMA_DEPTH):
            raise InvalidRequestError(f"{where} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param=where)
        if (size := len(msgspec.json.encode(parameters))) > MAX_STRUCTURED_BYTES:
            raise InvalidRequestError(f"{where} may have {MAX_STRUCTURED_BYTES} bytes of JSON, got {size}", param=where)


def deeper_than(value: object, levels: int) -> bool:
    """Whether JSON-like `value` has more levels of lists and objects."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _template_function(function: FunctionJson) -> dict[str, object]:
    turned: dict[str, object] = {"name": function.name}
    if function.description is not None:
        turned["description"] = function.description
    turned["parameters"] = function.parameters or {"type": "object", "properties": {}}
    if function.strict is not None:
        turned["strict"] = function.strict
    return turned


def _schema(function: FunctionJson, *, keep: bool) -> dict[str, Any]:
    """What the arguments must match. keep: the function's own schema, else any object."""
    if not keep:
        return {"type": "object"}
    if not function.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}
