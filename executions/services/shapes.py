"""What of a declaration a request gives: as the JSON object in its body, or as its query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from executions.services.declared import refuse, refuse_invalid, shown

T = TypeVar("T")

_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_LONGEST_NUMBER = 15


@dataclass(eq=False)
class Body(Generic[T]):
    """The body of a request: a JSON object with the fields of a declaration, without `ours`.

    `only` has fields of which Python may give other values too. Null stands for a key left out,
    unless `has_null`. `says` is what JSON Schema says of several fields together.
    """

    declaration: type[T]
    name: str
    ours: tuple[str, ...] = ()
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_null: bool = False
    says: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """The keys that a caller may give, in their order."""
        return tuple(name for name in _keys(self.declaration) if name not in self.ours)

    def read(self, body: Any, **ours: Any) -> T:
        """Raises InvalidConfiguration, which names the key at fault, or `body`."""
        keys = _keys(self.declaration)
        if body is None and not any(keys.values()):
            body = {}
        if not isinstance(body, dict):
            refuse("body", "Must be a JSON object.")
        for key in body:
            if key not in keys or key in self.ours:
                refuse(shown(key), f"Unknown field. Known are: {', '.join(self.known)}.")
        given = body
        if not self.has_null:
            given = {key: value for key, value in body.items() if value is not None}
        for key, values in self.only.items():
            if key in given and given[key] not in values:
                refuse(key, f"Must be one of: {', '.join(values)}.")
        try:
            return self.declaration(**given, **ours)
        except ValidationError as error:
            refuse_invalid(error)

    def schema(self) -> dict[str, Any]:
        """It in JSON Schema, with the bounds that are in force now."""
        schema = _schema(self.declaration)
        required = [name for name in schema.get("required", ()) if name in self.known]
        properties = {}
        for name in self.known:
            each = schema["properties"][name]
            if name in self.only:
                each = {**each, "enum": list(self.only[name])}
            if name not in required and not self.has_null:
                each = _or_null(each)
            properties[name] = each
        described: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            described["required"] = required
        elif not self.says:
            described["type"] = ["object", "null"]
        return {**described, "additionalProperties": False, **self.says}


@dataclass(eq=False)
class Query(Generic[T]):
    """The parameters of a request, whose texts are read as what is declared.

    `headers` are those that come as headers. Where `empty_is_none`, an empty text stands for a
    parameter left out; where `is_open`, there are others that are not its own.
    """

    declaration: type[T]
    headers: tuple[str, ...] = ()
    empty_is_none: bool = False
    is_open: bool = False

    def read(self, query: Mapping[str, str]) -> T:
        """Raises InvalidConfiguration, which names the parameter at fault."""
        properties = self._properties()
        given: dict[str, Any] = {}
        for name, text in query.items():
            if name in properties:
                if text or not self.empty_is_none:
                    given[name] = _value(name, text, _type(properties[name]))
            elif not self.is_open:
                refuse(shown(name), f"Unknown parameter. Known are: {', '.join(properties)}.")
        return self.declaration(**given)

    def schema(self) -> dict[str, Any]:
        """Its parameters as an object in JSON Schema. No text is null."""
        schema = _schema(self.declaration)
        properties = {name: _not_null(each) for name, each in schema["properties"].items()}
        return {**schema, "properties": properties}

    def _properties(self) -> dict[str, Any]:
        found = _PROPERTIES.get(self.declaration)
        if found is None:
            found = _PROPERTIES[self.declaration] = self.schema()["properties"]
        return found


_PROPERTIES: dict[type, dict[str, Any]] = {}
_KEYS: dict[type, dict[str, bool]] = {}


def _keys(declaration: Any) -> dict[str, bool]:
    """What it can be made with, and whether it must be."""
    if (found := _KEYS.get(declaration)) is None:
        models = issubclass(declaration, BaseModel)
        known = declaration.model_fields if models else declaration.__pydantic_fields__
        found = _KEYS[declaration] = {
            each.alias or name: each.is_required()
            for name, each in known.items()
            if each.init is not False
        }
    return found


def _value(name: str, text: str, kind: str) -> Any:
    if kind == "boolean":
        if (flag := _FLAGS.get(text.lower())) is None:
            refuse(name, "Must be 1 or 0.")
        return flag
    if kind == "integer":
        if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
            refuse(name, "Must be a whole number.")
        return int(text)
    return text


def _type(schema: Mapping[str, Any]) -> str:
    for each in (schema, *schema.get("anyOf", ())):
        if (kind := each.get("type", "null")) != "null":
            return str(kind)
    return ""


def _schema(declaration: type) -> dict[str, Any]:
    schema = TypeAdapter(declaration).json_schema(by_alias=True)
    plain: dict[str, Any] = _plain(schema, schema.pop("$defs", {}))
    return plain


def _plain(schema: Any, parts: Mapping[str, Any]) -> Any:
    """Without references and titles."""
    if isinstance(schema, list):
        return [_plain(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        part = parts[schema["$ref"].rpartition("/")[2]]
        schema = {**part, **{key: value for key, value in schema.items() if key != "$ref"}}
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain(each, parts) for name, each in value.items()}
        elif key != "title" and not (key == "default" and value is None):
            plain[key] = _plain(value, parts)
    return plain


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    several = schema.get("anyOf", ())
    rest = [each for each in several if each.get("type") != "null"]
    if len(rest) == len(several):
        return schema
    others = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**rest[0], **others} if len(rest) == 1 else {**others, "anyOf": rest}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema or schema.get("type") == "null":
        return schema
    if "enum" in schema:
        schema = {**schema, "enum": [*schema["enum"], None]}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return schema
