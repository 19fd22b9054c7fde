"""A service that stops tells its clients, and does not wait for them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.conftest import require
from tests.support.codex_door import Client, Socket, capability_path
from tests.support.site import running_site


def test_open_connections_are_closed_and_the_service_ends(tmp_path: Path) -> None:
    require("bwrap")
    with running_site(tmp_path) as site:
        path = capability_path(site)
        client = Client(site.service, path)
        client.initialize()
        client.start("left", "sleep", "300")
        quiet = Socket(site.service, path)
        site.service.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert client.socket.wait_until_closed() == 1001
        assert quiet.wait_until_closed() == 1001
        client.close()
        quiet.close()
        site.service.process.wait(60)
        assert time.monotonic() - began < 60
