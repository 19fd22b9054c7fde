"""What a rule finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """A subject that a rule does not hold for now."""

    subject: str
    value: float | None
    message: str
