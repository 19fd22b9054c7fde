"""A remote service's own templates, which stand for those of the installation by their names."""

from __future__ import annotations

import re
from typing import Any

from providers.errors import InvalidConfiguration
from providers.schema import ConfigField

_PAIR = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})=([A-Za-z0-9][A-Za-z0-9._:/-]{0,199})")

FIELD = ConfigField(
    "string",
    "Templates",
    address=False,
    max=10_000,
    placeholder="science=my-science-template",
    description="name=template of the service, separated by commas. A run or session with the "
    "installation's template of this name has the service's.",
)


def read_templates(text: Any) -> dict[str, str]:
    """Return the service's template by the name of ours. Raises InvalidConfiguration."""
    found: dict[str, str] = {}
    for word in re.findall(r"[^\s,]+", text or ""):
        pair = _PAIR.fullmatch(word)
        if pair is None or pair[1] in found:
            problem = "is not name=template" if pair is None else "has a name that is there twice"
            raise InvalidConfiguration(f"templates: {word[:80]!r} {problem}.", field="templates")
        found[pair[1]] = pair[2]
    return found
