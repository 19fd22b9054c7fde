"""Tools of a caller's that running code may call: see docs/tools.md."""

from __future__ import annotations
