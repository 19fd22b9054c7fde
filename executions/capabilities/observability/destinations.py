"""Where observations go, as the settings say it. The settings import this; it imports nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AuditDestination:
    """The collector that has every entry of the ledger sent. `headers` are of OTLP alone."""

    kind: str = ""
    host: str = ""
    port: int = 0
    path: str = ""
    ca: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """What it is called by in the database and on pages."""
        return f"{self.kind} {self.host}:{self.port}{self.path}"[:200]


@dataclass(frozen=True)
class Telemetry:
    """The collector of traces and metrics: OTLP over HTTP. `seconds` is what a request may take."""

    endpoint: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    service: str = "cofferdam"
    instance: str = ""
    seconds: int = 10

    def address(self, signal: str) -> str:
        """Where `traces` or `metrics` go."""
        return f"{self.endpoint.rstrip('/')}/v1/{signal}"
