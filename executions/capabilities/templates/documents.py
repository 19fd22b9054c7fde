"""Templates as TOML: what a file in a repository has, and the form of the admin."""

from __future__ import annotations

import json
import tomllib
from typing import Any, NamedTuple

from providers.errors import InvalidConfiguration
from providers.templates.declaration import Declaration, check_name

MOST_CHARACTERS = 2 * 1024 * 1024


class Document(NamedTuple):
    """What a file says of one template."""

    name: str
    description: str
    declaration: Declaration


def read_file(text: str) -> Document:
    """Read a file: a declaration with `name` and, where it has one, `description`.

    Raises InvalidConfiguration naming the field.
    """
    document = _parsed(text)
    name, description = document.pop("name", None), document.pop("description", "")
    if not isinstance(name, str):
        raise InvalidConfiguration('name: Must be a text, as in name = "science".', field="name")
    check_name(name)
    if not isinstance(description, str) or len(description) > 300:
        raise InvalidConfiguration(
            "description: Must be a text of at most 300 characters.", field="description"
        )
    return Document(name, description, Declaration.parse(document))


def read_declaration(text: str) -> Declaration:
    """Read a declaration without a name. Raises InvalidConfiguration naming the field."""
    return Declaration.parse(_parsed(text))


def to_toml(declaration: Declaration) -> str:
    """Return the text that `read_declaration` reads."""
    said = declaration.to_json()
    plain = ("base", "python", "npm", "apt", "build", "run", "start", "ready")
    lines = [f"{name} = {_value(said[name])}" for name in plain if said[name]]
    for name in ("environment", "files", "network", "limits"):
        if said[name]:
            lines += ["", f"[{name}]"]
            lines += [f"{_value(key)} = {_value(value)}" for key, value in said[name].items()]
    return "\n".join(lines).strip() + "\n"


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > MOST_CHARACTERS:
        raise InvalidConfiguration(
            f"declaration: Must be at most {MOST_CHARACTERS} characters.", field="declaration"
        )
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidConfiguration(
            f"declaration: Is not TOML: {error}", field="declaration"
        ) from None


def _value(value: Any) -> str:
    """A text, a list of texts, or an object of them. TOML writes texts as JSON does, but for one
    control character."""
    if isinstance(value, dict):
        parts = (f"{_value(name)} = {_value(each)}" for name, each in value.items())
        return f"{{ {', '.join(parts)} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
