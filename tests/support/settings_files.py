"""A file of system settings."""

from __future__ import annotations

import json
from typing import Any


def record(name: str, value: Any) -> dict[str, str]:
    text = value if isinstance(value, str) else json.dumps(value)
    data_type = "string" if isinstance(value, str) else "json"
    return {"name": name, "source": "variable", "data_type": data_type, "value": text}
