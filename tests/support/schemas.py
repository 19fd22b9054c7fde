"""Shapes of the API's description, read strictly."""

from __future__ import annotations

from typing import Any


def strict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A described shape that allows nothing but what is named."""

    def close(node: Any) -> Any:
        if isinstance(node, list):
            return [close(child) for child in node]
        if not isinstance(node, dict):
            return node
        node = {key: close(child) for key, child in node.items()}
        if "properties" in node:
            node.setdefault("additionalProperties", False)
        return node

    return {
        **close({"components": schema["components"]}),
        "$ref": f"#/components/schemas/{name}",
    }
