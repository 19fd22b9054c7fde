"""RFC 5424 over TLS (RFC 5425), a connection for each batch.

Syslog answers nothing. What says that a batch has arrived is the end of its connection: TLS is
closed from here, and the collector's own close_notify comes only after it has read all that was
before. One that went away in between, or somebody on the way who only acknowledges, sends none.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings

from executions.ledger.models import LedgerEntry
from executions.services.audit_export.events import events_of
from sandbox_site.observability import AuditDestination

# For each step: connecting, the handshake, sending a batch, its end.
STEP_SECONDS = 10.0
# Facility 13, "log audit", and severity 6, "informational".
_PRIORITY = 13 * 8 + 6
_MOST_SEQUENCE = 2**31 - 1
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


def send(entries: Sequence[LedgerEntry], destination: AuditDestination) -> None:
    """Returns when the collector has read them all. Raises OSError, ssl.SSLError among them."""
    frames = b"".join(map(frame_of, entries, events_of(entries)))
    context = ssl.create_default_context(cadata=destination.ca or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python takes the end of a connection for a close_notify. Here it says that something is lost.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    place = (destination.host, destination.port)
    with (
        socket.create_connection(place, timeout=STEP_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=destination.host) as secure,
    ):
        secure.settimeout(STEP_SECONDS)
        secure.sendall(frames)
        secure.unwrap()


def frame_of(entry: LedgerEntry, event: Mapping[str, Any]) -> bytes:
    """One message, with its length before it: nothing within can end it."""
    at = entry.at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    host = _UNPRINTABLE.sub("-", settings.INSTANCE)[:255] or "-"
    kind = _UNPRINTABLE.sub("-", entry.kind)[:32] or "-"
    number = (entry.sequence - 1) % _MOST_SEQUENCE + 1
    text = json.dumps(event, separators=(",", ":"))
    head = f'<{_PRIORITY}>1 {at} {host} cofferdam - {kind} [meta sequenceId="{number}"] '
    message = (head + text).encode("ascii")
    return b"%d %s" % (len(message), message)
