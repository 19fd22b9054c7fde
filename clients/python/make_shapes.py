"""Generate cofferdam/shapes.py from the server's OpenAPI description.

curl -s $COFFERDAM_URL/api/schema?format=json | python make_shapes.py > cofferdam/shapes.py
ruff format cofferdam/shapes.py
"""

from __future__ import annotations

import json
import keyword
import sys
import textwrap
from typing import Any

# What the client answers with; what they consist of comes with them.
WANTED = (
    *("Execution", "ExecutionSummary", "Session", "Context", "Process", "File"),
    *("Snapshot", "Usage"),
)
HEAD = '''\
"""Answers of the service. Generated from its OpenAPI description by make_shapes.py: do not edit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from cofferdam.decoding import Shape
'''
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


class Shapes:
    def __init__(self, components: dict[str, Any]) -> None:
        self.components = components
        self.made: dict[str, str] = {}

    def hint(self, schema: dict[str, Any]) -> str:
        """The annotation of a value."""
        if "$ref" in schema:
            return self.named(schema["$ref"].rpartition("/")[2])
        if "enum" in schema:
            return f"Literal[{', '.join(map(json.dumps, schema['enum']))}]"
        for several in ("oneOf", "anyOf", "allOf"):
            if several in schema:
                return " | ".join(self.hint(each) for each in schema[several])
        kinds = schema.get("type")
        if kinds is None:
            return "Any"
        each = [kinds] if isinstance(kinds, str) else kinds
        return " | ".join(self.of_kind(kind, schema) for kind in each)

    def of_kind(self, kind: str, schema: dict[str, Any]) -> str:
        if kind == "array":
            return f"list[{self.hint(schema['items'])}]"
        if kind == "object":
            return "dict[str, Any]"
        if kind == "string" and schema.get("format") == "date-time":
            return "datetime"
        return PLAIN[kind]

    def named(self, name: str) -> str:
        schema = self.components[name]
        if "properties" not in schema:
            return self.hint(schema)
        if name not in self.made:
            self.made[name] = ""
            self.made[name] = self.dataclass(name, schema)
        return name

    def dataclass(self, name: str, schema: dict[str, Any]) -> str:
        lines = [f"\n\n@dataclass(frozen=True, kw_only=True)\nclass {name}(Shape):"]
        if text := schema.get("description"):
            lines.append(f'    """{text}"""\n')
        for field, each in schema["properties"].items():
            if not field.isidentifier() or keyword.iskeyword(field) or field == "raw":
                raise SystemExit(f"{name}.{field} cannot be a name in Python")
            hint = self.hint(each)
            default = "" if field in schema.get("required", ()) else " | None = None"
            # What the values of an enumeration are is said by their type.
            text = each.get("description", "").partition("\n\n*")[0].replace("\n", " ").strip()
            lines += [f"    # {line}" for line in textwrap.wrap(text, 90)]
            lines.append(f"    {field}: {hint}{default}")
        return "\n".join(lines) + "\n"


def shapes_of(description: dict[str, Any]) -> str:
    """The module's text, before it is formatted."""
    shapes = Shapes(description["components"]["schemas"])
    for name in WANTED:
        shapes.named(name)
    return HEAD + "".join(shapes.made[name] for name in sorted(shapes.made))


if __name__ == "__main__":
    sys.stdout.write(shapes_of(json.load(sys.stdin)))
