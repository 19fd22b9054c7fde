"""A file larger than the service's memory may be goes up and down as a stream."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.required import require
from tests.support.site import Site, prepare, serving

# Nearly all that a sandbox holds.
SIZE = 96 << 20
PIECE = bytes(range(256)) * 4096
# What all processes together may take more at their peaks: less than the file, whatever else begins.
MOST_MORE = 88 << 20


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    require("bwrap")
    prepared = prepare(tmp_path / "data")
    settings = {"SANDBOX_MAX_BODY_BYTES": str(SIZE), "SANDBOX_REAPER_INTERVAL": "1"}
    with serving(prepared, tmp_path / "log", **settings) as site:
        yield site


class Caller:
    def __init__(self, site: Site) -> None:
        self._port, self._key = site.service.port, site.alice

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The answer, whose body is still to be read."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        given = {"X-API-Key": self._key, "Content-Type": "application/json", **headers}
        connection.request(method, f"/api/v1/sessions{path}", body, given)
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        return answer

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.load(self.ask(method, path, body and json.dumps(body)))


def peaks(site: Site, *, begin: bool = False) -> int:
    """What the service's processes took at most since it was begun to count, in bytes."""
    total = 0
    for pid in (site.service.process.pid, *site.service.look()):
        try:
            if begin:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if "VmHWM:" in status:
            total += 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return total


@pytest.mark.one_database
def test_a_large_file_goes_up_and_down_in_constant_memory(site: Site) -> None:
    caller = Caller(site)
    session = caller.json("POST", "", {"idle_seconds": 1})
    path = f"/{session['id']}"
    until = time.monotonic() + 60
    while caller.json("GET", path)["state"] != "asleep":
        assert time.monotonic() < until
        time.sleep(0.1)
    content = f"{path}/files/content?path=d/large"
    before = peaks(site, begin=True)
    sent = (PIECE for _ in range(SIZE // len(PIECE)))
    kind = {"Content-Type": "application/octet-stream", "Content-Length": str(SIZE)}
    caller.ask("PUT", content, sent, **kind).read()
    digest, size = hashlib.sha256(), 0
    answer = caller.ask("GET", content)
    while piece := answer.read(1 << 20):
        size += len(piece)
        digest.update(piece)
    # A range of it, and all of it as an archive.
    part = caller.ask("GET", content, Range=f"bytes={SIZE - 7}-{SIZE}").read()
    archive = caller.ask("GET", f"{path}/files/archive?path=d")
    archived = 0
    while piece := archive.read(1 << 20):
        archived += len(piece)
    more = peaks(site) - before

    expected = hashlib.sha256()
    for _ in range(SIZE // len(PIECE)):
        expected.update(PIECE)
    assert (size, digest.hexdigest()) == (SIZE, expected.hexdigest())
    assert part == PIECE[-7:]
    assert SIZE < archived < SIZE + (1 << 20)
    assert more < MOST_MORE, f"{more >> 20} MiB"
