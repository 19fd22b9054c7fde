"""The options of an installation that running code depends on.

The code that runs code imports no Django. A project gives its settings here once, when it starts.
Without a project, as in a provider's own tests, the usual values hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Options(Protocol):
    """What the runtime reads; docs/settings.md says what each means."""

    @property
    def POOL_HOST(self) -> str: ...

    @property
    def POOL_PORT(self) -> int: ...

    @property
    def PROVIDER_ALLOWED_NETWORKS(self) -> Sequence[str]: ...

    @property
    def PROVIDER_PLAIN_HTTP(self) -> Sequence[str]: ...

    @property
    def PROVIDER_WAITS(self) -> int: ...


@dataclass(frozen=True)
class Usual:
    """The options where nobody gave any."""

    POOL_HOST: str = "127.0.0.1"
    POOL_PORT: int = 9385
    PROVIDER_ALLOWED_NETWORKS: Sequence[str] = ()
    PROVIDER_PLAIN_HTTP: Sequence[str] = ()
    PROVIDER_WAITS: int = 32


_options: Options = Usual()


def use_options(options: Options) -> None:
    """Have these options hold. Each is read when it is needed."""
    global _options
    _options = options


def options() -> Options:
    """Return the options that hold."""
    return _options
