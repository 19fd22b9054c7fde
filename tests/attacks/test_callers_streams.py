"""Callers of streams who mean harm: who reads nothing, leaves at once, floods, or asks for others'."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from executions.runs.event_stream import MOST_OF_EXECUTION
from tests.support.raw_http import ask, connect, request
from tests.support.site import EXECUTIONS, Site, sleeper
from tests.support.streaming import NDJSON, running_stream, streamed
from tests.support.waiting import wait_until

# As many as may follow one execution.
STREAMS = MOST_OF_EXECUTION
# In single bytes, one stream after the other: the most events that its output can be made of.
FLOOD = """
import os, time
for _ in range(20_000):
    os.write(1, b"o")
    os.write(2, b"e")
"""


@pytest.fixture
def site(streaming_site: Site) -> Site:
    return streaming_site


def memory_of(pid: int) -> int:
    """Bytes that it and its children hold."""
    total = 0
    for each in (pid, *_children(pid)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/status").read_text().split("VmRSS:")
            total += int(fields[1].split()[0]) * 1024 if len(fields) > 1 else 0
    return total


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [each for child in found for each in _children(child)]


def test_those_who_read_nothing_hold_up_nobody_and_little_memory(site: Site) -> None:
    code = f"{FLOOD}\nprint('x' * 150_000, flush=True)\ntime.sleep(60)"
    with running_stream(site, {"code": code, "timeout": 70}, "?detach=1") as events:
        execution_id = next(events)["id"]
        # Until all of it is there to be read.
        read = 0
        while read < 20_000 + 20_000 + 150_000:
            read += len(next(events)["text"])
    path = f"{EXECUTIONS}/{execution_id}/events"
    before = memory_of(site.service.process.pid)

    with contextlib.ExitStack() as stack:
        asking = request("GET", path, key=site.alice, Accept=NDJSON)
        for _ in range(STREAMS):
            stack.enter_context(connect(site.service, asking))
        site.assert_serves_others()
        more = memory_of(site.service.process.pid) - before

    cancelled = ask(site.service, "POST", f"{path[:-7]}/cancel", {}, key=site.alice)
    assert cancelled.json["status"] == "cancelled"
    # What each has unread are some 300 KB of the kernel's; here it is what he was last given.
    assert more < STREAMS * 1024 * 1024
    site.assert_serves_others()


def test_all_who_leave_at_once_leave_nothing_running(site: Site) -> None:
    sent = request("POST", EXECUTIONS, sleeper(60), key=site.alice, Accept=NDJSON)
    for _ in range(20):
        connect(site.service, sent).close()

    site.wait_for_running(0)
    site.assert_serves_others()


def test_a_flood_of_single_bytes_arrives_whole(site: Site) -> None:
    with running_stream(site, {"code": FLOOD}) as events:
        found = list(events)

    texts = {"stdout": "", "stderr": ""}
    for event in found[1:-1]:
        texts[event["type"]] += event["text"]
    assert texts == {"stdout": "o" * 20_000, "stderr": "e" * 20_000}
    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    assert found[-1]["execution"]["stdout"] == texts["stdout"]


def test_half_a_character_and_no_text_at_all_are_told_as_they_are(site: Site) -> None:
    code = (
        "import os, time\n"
        "os.write(1, b'\\xc3'); time.sleep(0.2); os.write(1, b'\\xa9'); time.sleep(0.2)\n"
        "os.write(1, b'\\xff\\x00')"
    )
    with running_stream(site, {"code": code}) as events:
        found = [event for event in events if event["type"] == "stdout"]

    assert "".join(event["text"] for event in found) == "é\ufffd\0"
    assert found[-1]["data_base64"].endswith("/wA=")


def test_a_stranger_learns_nothing_of_a_run(site: Site) -> None:
    with running_stream(site, sleeper(60)) as events:
        path = f"{EXECUTIONS}/{next(events)['id']}"
        for method, what in (("GET", "events"), ("POST", "cancel")):
            answer = ask(site.service, method, f"{path}/{what}", key=site.charlie)
            assert answer.status == 404
            assert json.loads(answer.body)["error"]["code"] == "not_found"
        with streamed(site.service, f"{path}/events", "cfd_wrong") as refused:
            assert refused.answer.status == 401
        assert ask(site.service, "GET", path, key=site.alice).json["status"] == "running"
    wait_until(lambda: site.running() == 0, 60)
