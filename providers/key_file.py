"""A file with keys that is read again when it has changed. The settings name one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KeyFile:
    """Where keys lie, comma separated: in the line `name=...` of a file, or in all of it."""

    path: Path
    name: str = ""

    def state(self) -> Any:
        """Another one after each change; None while it is not there."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def read(self) -> tuple[str, ...]:
        """The keys, none where the file cannot be read or has none."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ()
        if self.name:
            lines = (line.partition("=") for line in text.splitlines())
            text = next((value for name, _, value in lines if name.strip() == self.name), "")
        return tuple(key.strip() for key in text.split(",") if key.strip())
