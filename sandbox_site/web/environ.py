"""A request as WSGI has it, out of one as ASGI has it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import unquote_to_bytes

from executions.doors.native.authentication import RECEIVED


def make_environ(scope: Mapping[str, Any], body: IO[bytes]) -> dict[str, Any]:
    """As PEP 3333 wants it: text is bytes decoded as Latin-1, and repeated headers are joined."""
    client, server = scope["client"], scope["server"]
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "SERVER_NAME": str(server[0]) if server else "",
        "SERVER_PORT": str(server[1]) if server else "",
        # A Unix socket has no address, and neither have its clients.
        "REMOTE_ADDR": str(client[0]) if client else "",
        "REMOTE_PORT": str(client[1]) if client else "",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.input": body,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        RECEIVED: time.perf_counter(),
    }
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").upper().replace("-", "_")
        value = raw_value.decode("latin-1")
        if name not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            name = f"HTTP_{name}"
        if name in environ:
            value = f"{environ[name]}{'; ' if name == 'HTTP_COOKIE' else ','}{value}"
        environ[name] = value
    return environ
