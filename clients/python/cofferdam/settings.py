"""The service's URL and the API key: arguments, or COFFERDAM_URL and COFFERDAM_API_KEY."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cofferdam.errors import InvalidSettings

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Settings:
    """`url` has no slash at its end. Raises InvalidSettings."""

    url: str
    api_key: str = field(repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise InvalidSettings("COFFERDAM_URL: Must be a URL such as https://runs.example.")
        if not self.api_key or not self.api_key.isascii() or not self.api_key.isprintable():
            raise InvalidSettings("COFFERDAM_API_KEY: Must be a Cofferdam API key, such as cfd_...")


def settings_from(url: str | None, api_key: str | None) -> Settings:
    url = url or os.environ.get("COFFERDAM_URL") or DEFAULT_URL
    api_key = os.environ.get("COFFERDAM_API_KEY", "") if api_key is None else api_key
    return Settings(url.rstrip("/"), api_key.strip())
