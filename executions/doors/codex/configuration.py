"""The block of Codex's environments.toml by which its commands run here."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from django.views.decorators.debug import sensitive_variables

from executions.doors.codex.connection import read_query
from executions.doors.codex.credentials import PATH
from executions.kernel.declarations import refuse

OPTIONS = {
    "template": "a template of the tenant, as NAME or NAME@3",
    "language": "the language of the session's interpreter; the default is python",
    "network": "none, open, packages, or hosts with commas between",
    "folder": "the folder in which Codex is used: its commands have the workspace in its place",
    "idle_seconds": "how long an unused session stays awake; the default is 600",
}
_SCHEMES = ("ws://", "wss://")
_BLOCK = """\
default = "cofferdam"
include_local = false

[[environments]]
id = "cofferdam"
url = "{url}"
"""
_HEADER = """\
auth_bearer_token = "{token}"
"""


@sensitive_variables()
def environment_block(
    address: str, token: str, options: Mapping[str, str], *, in_url: bool = False
) -> str:
    """Return the block as TOML. `address` begins with ws:// or wss://, `token` opens the door, and
    `options` are of OPTIONS. Raises InvalidConfiguration."""
    address = address.rstrip("/")
    if not address.startswith(_SCHEMES) or not address.isprintable() or '"' in address:
        refuse("url", "Must begin with ws:// or wss://.")
    query = urlencode({name: options[name] for name in OPTIONS if options.get(name)})
    read_query(query)
    tail = f"?{query}" if query else ""
    if in_url:
        return _BLOCK.format(url=f"{address}{PATH}{token}{tail}")
    return _BLOCK.format(url=f"{address}{PATH}{tail}") + _HEADER.format(token=token)
