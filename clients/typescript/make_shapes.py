"""Make src/shapes.ts and src/requests.ts of the server's OpenAPI description.

curl -s $COFFERDAM_URL/api/schema?format=json | python make_shapes.py
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

# What the client is answered with and asks for; what they consist of comes with them.
ANSWERS = (
    *("Execution", "ExecutionSummary", "Session", "Context", "Process", "File", "Snapshot"),
    *("StatusEnum", "Usage", "Languages", "LedgerKeys", "AdminMessage", "AdminPending"),
    *("AdminTrial",),
)
REQUESTS = (
    *("ExecutionRequest", "Cell", "Command", "SessionRequest", "PatchedSessionChanges"),
    *("ContextRequest", "SignalEnum", "AdminConfig", "AdminTest", "AdminActive"),
)
FILTERS = {"ExecutionFilters": "/api/v1/executions", "SessionFilters": "/api/v1/sessions"}
HEAD = "/** What the service {}. Made by make_shapes.py: do not edit. */\n"
SOURCES = Path(__file__).resolve().parent / "src"
PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}


class Shapes:
    def __init__(self, components: dict[str, Any]) -> None:
        self.components = components
        self.made: dict[str, str] = {}

    def hint(self, schema: dict[str, Any]) -> str:
        """The type of a value."""
        if "$ref" in schema:
            return self.named(schema["$ref"].rpartition("/")[2])
        if "enum" in schema:
            return " | ".join(map(json.dumps, schema["enum"]))
        for several in ("oneOf", "anyOf", "allOf"):
            if several in schema and "type" not in schema:
                return _either(map(self.hint, schema[several]))
        kinds = schema.get("type", ())
        return _either(self.of_kind(kind, schema) for kind in _list(kinds)) or "unknown"

    def of_kind(self, kind: str, schema: dict[str, Any]) -> str:
        if kind == "array":
            item = self.hint(schema["items"])
            return f"Array<{item}>" if " " in item else f"{item}[]"
        if kind == "object" and "properties" in schema:
            return "{ " + "; ".join(line for line, _ in self.fields(schema)) + " }"
        if kind == "object":
            values = _either(map(self.hint, schema.get("patternProperties", {}).values()))
            return f"Record<string, {values or 'unknown'}>"
        return "null" if kind == "null" else PLAIN[kind]

    def named(self, name: str) -> str:
        schema = self.components[name]
        if name not in self.made and "properties" in schema:
            self.made[name] = ""
            self.made[name] = interface(name, schema.get("description", ""), self.fields(schema))
        elif name not in self.made and name in (*ANSWERS, *REQUESTS):
            self.made[name] = f"\n{_folded(f'export type {name} = {self.hint(schema)};', '  ')}\n"
        return name if name in self.made else self.hint(schema)

    def text(self) -> str:
        return "".join(self.made[name] for name in sorted(self.made))

    def fields(self, schema: dict[str, Any]) -> list[tuple[str, str]]:
        """The lines of an object's fields, and what is said of them."""
        return [
            (f"{name}{'' if name in schema.get('required', ()) else '?'}: {self.hint(each)}", text)
            for name, each in schema["properties"].items()
            # What the values of an enumeration are is said by their type.
            for text in [each.get("description", "").partition("\n\n*")[0].strip()]
        ]


def interface(name: str, description: str, fields: list[tuple[str, str]]) -> str:
    lines = ["", *_comment("", description), f"export interface {name} {{"]
    for field, text in fields:
        lines += [*_comment("  ", text), _folded(f"  {field};", "    ")]
    return "\n".join([*lines, "}", ""])


def filters(name: str, operation: dict[str, Any], shapes: Shapes) -> str:
    """What a list may be asked for; the page of it is the client's to follow."""
    fields = []
    for each in operation["parameters"]:
        wanted = [one for one in each["schema"]["anyOf"] if "const" not in one]
        if each["name"] != "cursor":
            hint = _either(shapes.hint(one) for one in wanted)
            fields.append((f"{each['name']}?: {hint}", each.get("description", "")))
    return interface(name, "", fields)


def shapes_of(description: dict[str, Any]) -> dict[str, str]:
    """The text of each module, by its name."""
    components = description["components"]["schemas"]
    answers, requests = Shapes(components), Shapes(components)
    for shapes, names in ((answers, ANSWERS), (requests, REQUESTS)):
        for name in names:
            shapes.named(name)
    for name, path in FILTERS.items():
        requests.made[name] = filters(name, description["paths"][path]["get"], requests)
    return {
        "shapes.ts": HEAD.format("answers") + answers.text(),
        "requests.ts": HEAD.format("is asked") + requests.text(),
    }


def _either(hints: Any) -> str:
    return " | ".join(dict.fromkeys(hints))


def _folded(line: str, indent: str) -> str:
    """A choice that is too long for one line, a line each."""
    if len(line) <= 100:
        return line
    found = re.split(r'(?<=[:=]) (?=")|(?<=") (?=\|)', line, maxsplit=2)
    if len(found) < 3:
        # An object without a name of its own, a line each field.
        head, _, rest = line.partition("{ ")
        inner, _, tail = rest.rpartition(" }")
        fields = inner.replace("; ", f";\n{indent}")
        return f"{head}{{\n{indent}{fields};\n{indent[2:]}}}{tail}"
    head, first, rest = found
    choices = [f"| {first}", *rest.replace(" | ", "\n| ").split("\n")]
    return "\n".join([head, *(indent + each for each in choices)])


def _list(kinds: Any) -> Any:
    return [kinds] if isinstance(kinds, str) else kinds


def _comment(indent: str, text: str) -> list[str]:
    if not text:
        return []
    lines = textwrap.wrap(text.replace("*/", "* /"), 90)
    if len(lines) == 1:
        return [f"{indent}/** {lines[0]} */"]
    return [f"{indent}/**", *(f"{indent} * {line}" for line in lines), f"{indent} */"]


if __name__ == "__main__":
    for module, text in shapes_of(json.load(sys.stdin)).items():
        (SOURCES / module).write_text(text)
