"""The formats of texts that a JSON schema may name. To those that grammars know a text is kept; any other is an
annotation, as JSON Schema has it, and would make the grammar compiler refuse all of the schema."""

from __future__ import annotations

from typing import Any

ENFORCED_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Those of the grammar compiler."""
_VALUES = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords of what an instance may be, in which nothing is a keyword."""
_BY_NAME = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
"""Keywords of schemas by names that are the author's own."""


def enforceable(schema: Any) -> Any:
    """`schema` without the formats that no grammar knows. What is below an unknown keyword is taken for schemas too: a
    reference may lead there."""
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword in _VALUES:
            kept[keyword] = value
        elif keyword in _BY_NAME and isinstance(value, dict):
            kept[keyword] = {name: enforceable(each) for name, each in value.items()}
        elif keyword != "format" or not isinstance(value, str) or value in ENFORCED_FORMATS:
            kept[keyword] = enforceable(value)
    return kept
