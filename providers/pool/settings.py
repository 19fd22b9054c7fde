"""How a pool is to be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Isolation = Literal["execution", "tenant"]


@dataclass(frozen=True)
class PoolSettings:
    """`size` warm sandboxes per template, `capacity` alive in all, `queue` callers waiting.

    A caller waits `patience` seconds at most for a sandbox. A template nobody asked for lately is
    kept warm with `minimum` only, one whose callers had to wait lately with `burst` more.
    `isolation` "tenant" lets one owner's runs follow one another in a sandbox. No sandbox stays
    warm or handed out without use for longer than `max_lifetime` seconds.
    """

    size: int = 4
    capacity: int = 16
    queue: int = 64
    patience: float = 10.0
    parallel_starts: int = 4
    minimum: int = 0
    burst: int = 0
    isolation: Isolation = "execution"
    max_lifetime: float = 300.0
