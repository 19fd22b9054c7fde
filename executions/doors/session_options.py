"""The session that a few texts ask for, as a URL or a command line has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings

from executions.runs.network import NetworkRequest
from executions.sessions.requests import SessionRequest
from providers.errors import InvalidConfiguration
from providers.network import PRESETS

OPTIONS = ("template", "language", "network", "idle_seconds", "provider")
_MODES = ("none", "open")


def read_options(given: Mapping[str, str], agent: str = "") -> SessionRequest:
    """Return the session that texts under names of OPTIONS ask for. An empty one asks for nothing.
    Raises InvalidConfiguration.

    `agent` is what the client calls itself. `network` is none, open, a preset, or hosts with commas
    between.
    """
    options: dict[str, Any] = {name: text for name, text in given.items() if text}
    if network := options.pop("network", ""):
        options["network"] = _network(network)
        options["offline"] = network == "none"
    if "idle_seconds" in options:
        text = str(options["idle_seconds"])
        options["idle_seconds"] = int(text) if text.isascii() and text.isdigit() else text
    metadata = {"client": agent} if agent else {}
    longest = settings.SESSION_MAX_SECONDS
    return SessionRequest(**options, metadata=metadata, max_seconds=longest)


def _network(text: str) -> NetworkRequest:
    if text in _MODES:
        asked: dict[str, Any] = {"mode": text}
    elif text in PRESETS:
        asked = {"preset": text}
    else:
        asked = {"allow": [each.strip() for each in text.split(",")]}
    try:
        return NetworkRequest(**asked)
    except ValueError:
        raise InvalidConfiguration("network: Is not a list of hosts.", field="network") from None
