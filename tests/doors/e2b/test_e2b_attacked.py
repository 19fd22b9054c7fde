"""Requests at the door for E2B's SDKs that cost the service more than whoever sends them."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
from e2b import SandboxException
from e2b_code_interpreter import Sandbox

from executions.doors.e2b import filesystem
from executions.doors.e2b.connect import Refused, messages_in
from executions.doors.e2b.filesystem import Told, WatchEvents
from executions.kernel.coroutines import immediate, run_sync
from executions.kernel.text import uuid7
from executions.runs.event_stream import AHEAD_BYTES
from executions.sessions.file_events import Watch
from executions.sessions.models import Session
from providers.errors import KeptSandboxLost
from providers.sandbox import FileChange, FileEntry
from tests.support.e2b_door import headers_of, native_of, opened, post
from tests.support.site import Site


class Counted(bytes):
    """Counts what is copied out of it, and out of those copies."""

    copied = 0

    def __getitem__(self, key: object) -> object:  # type: ignore[override]
        found = super().__getitem__(key)  # type: ignore[index]
        if isinstance(found, bytes):
            Counted.copied += len(found)
            return Counted(found)
        return found


def test_a_body_of_empty_messages_is_not_copied_for_each_of_them() -> None:
    body = Counted(b"\2\0\0\0\0" * 2000 + b"\0\0\0\0\2{}" * 2000)
    assert list(messages_in(body)) == [{}] * 2000
    assert Counted.copied <= 2 * len(body)


def test_what_is_said_of_a_changed_file_counts_for_what_is_held_of_a_watch() -> None:
    end = FileEntry("/" + "e" * 4000, "file")
    metadata = {"name": "v" * 4000}
    entry = FileEntry("/tmp/l", "symlink", target="t" * 4000, end=end, metadata=metadata)
    watch, held = Watch(), 0
    while not watch.is_full:
        watch.tell(FileChange("created", "/tmp/l", entry=entry))
        held += 12_000
    assert held < 2 * AHEAD_BYTES
    # Nor is more than this told at once.
    assert len(watch.read(0, 24_000)[0]) == 2


def test_a_search_by_more_names_than_any_is_refused(door: Site) -> None:
    for text in ("%26".join(f"a{n}%3D1" for n in range(50)), "a%3D%2500", "%2500%3Da"):
        answer = httpx.get(
            f"{door.service.url}/v2/sandboxes?metadata={text}", headers={"X-API-KEY": door.alice}
        )
        assert answer.status_code == 400, answer.text
        assert "metadata" in answer.text


def test_a_link_of_more_fields_than_any_is_refused_before_its_body_is_read(door: Site) -> None:
    fields = "&".join(f"a{n}=1" for n in range(50))
    answer = httpx.post(
        f"{door.service.url}/files?signature=v1_x&{fields}", content=bytes(3_000_000)
    )
    assert answer.status_code == 401, answer.text


def test_what_follows_a_gzip_is_neither_kept_nor_left_out_unsaid(
    door: Site, sandbox: Sandbox
) -> None:
    headers = headers_of(
        sandbox, **{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    )
    for more in (gzip.compress(b"second"), bytes(3_000_000)):
        answer = post(door, "/files?path=two", gzip.compress(b"first") + more, headers)
        assert answer.status_code == 400, answer.text
    assert not sandbox.files.exists("two")


@pytest.mark.parametrize("port", [3000, 80, 22])
def test_a_port_of_the_sandboxs_own_is_not_taken_for_ours(
    door: Site, sandbox: Sandbox, port: int
) -> None:
    for method, path in (("GET", "/health"), ("GET", "/contexts"), ("POST", "/execute")):
        answer = httpx.request(
            method,
            f"{door.service.url}{path}",
            content=b'{"code":"1"}',
            headers=headers_of(sandbox, port),
        )
        assert answer.status_code == 502
        assert "not open" in answer.text


def test_contexts_that_are_no_text_are_not_there(door: Site, sandbox: Sandbox) -> None:
    for context in (["default"], {"a": 1}, 5, True):
        content = json.dumps({"code": "1", "context_id": context}).encode()
        assert post(door, "/execute", content, headers_of(sandbox, 49999)).status_code == 404


def test_a_pause_that_is_refused_makes_no_sandbox_older(door: Site) -> None:
    with opened() as sandbox:
        until = sandbox.get_info().end_at
        body = b'{"code":"import time\\nprint(1, flush=True)\\ntime.sleep(60)"}'
        with httpx.stream(
            "POST",
            f"{door.service.url}/execute",
            content=body,
            headers=headers_of(sandbox, 49999),
            timeout=60,
        ) as running:
            lines = running.iter_lines()
            assert any('"stdout"' in line for line in lines)
            answer = httpx.post(
                f"{door.service.url}/sandboxes/{sandbox.sandbox_id}/pause",
                json={},
                headers={"X-API-KEY": door.alice},
                timeout=60,
            )
            assert answer.status_code == 423, answer.text
            # Which the SDK does not take for one that is paused already, with its files kept.
            with pytest.raises(SandboxException, match="sandbox is busy"):
                sandbox.pause()
            assert sandbox.is_running()
        assert abs((sandbox.get_info().end_at - until).total_seconds()) < 30


def test_a_process_that_went_with_a_sleeping_sandbox_is_not_found(door: Site) -> None:
    with opened() as sandbox:
        command = sandbox.commands.run("sleep 600", background=True)
        assert sandbox.pause()
        assert command.kill() is False


def test_files_that_are_touched_here_have_lines_in_the_log(door: Site, sandbox: Sandbox) -> None:
    sandbox.files.write("logged", "x")
    sandbox.files.read("logged")
    sandbox.files.rename("logged", "renamed")
    sandbox.files.list("")
    sandbox.files.make_dir("made")
    sandbox.files.remove("renamed")
    session = native_of(sandbox).rpartition("/")[2]
    lines = [json.loads(line) for line in door.service.output.splitlines() if session in line]
    found = {line.get("operation") for line in lines}
    assert found >= {
        *("write_file", "read_file", "move_file"),
        *("list_files", "make_directory", "remove_file"),
    }
    assert "logged" not in str(lines)


def test_a_watch_that_nobody_asks_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, session = Watch(), Session(id=uuid7())
    number = filesystem.keep(session.pk, watch, Told(""))
    assert watch.is_wanted
    monkeypatch.setattr(filesystem, "UNASKED_SECONDS", -1.0)
    # There is no sandbox that could be asked.
    monkeypatch.setattr(filesystem, "_catch_up", lambda session, kept: immediate(lambda: None))
    assert run_sync(filesystem.events_of(session, number)) == []
    assert not watch.is_wanted


@pytest.mark.parametrize("error", [None, KeptSandboxLost("It is gone.")])
def test_a_watch_that_has_ended_tells_the_rest_and_then_says_so(
    error: KeptSandboxLost | None,
) -> None:
    watch, session = Watch(), Session(id=uuid7())
    number = filesystem.keep(session.pk, watch, Told(""))
    watch.tell(FileChange("created", "last"))
    watch.end()
    if error is None:
        watch.ended.set_result(None)
    else:
        watch.ended.set_exception(error)
    (told,) = run_sync(filesystem.events_of(session, number))
    assert told["name"] == "last"
    with pytest.raises(Refused, match="has ended: It is gone" if error else "has ended") as caught:
        run_sync(filesystem.events_of(session, number))
    assert (caught.value.http_status, caught.value.word) == (404, "not_found")
    with pytest.raises(Refused, match="no such watcher"):
        run_sync(filesystem.events_of(session, number))


def test_a_watch_of_another_process_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, session = Watch(), Session(id=uuid7())
    number = filesystem.keep(session.pk, watch, Told(""))
    for wrong in (number[:-1], f"{number}0", "x", None, 5, "g" * 32, number.upper()):
        with pytest.raises(Refused, match="no such watcher"):
            run_sync(filesystem.events_of(session, wrong))
    # Nobody learns of a watch of another session.
    with pytest.raises(Refused, match="no such watcher"):
        run_sync(filesystem.events_of(Session(id=uuid7()), number))
    monkeypatch.setattr(filesystem, "_here", "00000000")
    filesystem.remove(session.pk, number)
    with pytest.raises(Refused, match="another process"):
        run_sync(filesystem.events_of(session, number))


def test_the_time_of_a_call_that_watches_ends_it() -> None:
    late = WatchEvents(Told("")).follow(Watch(), 0.0)
    late.send(None).exception(30)
    with pytest.raises(Refused, match="reached its timeout"):
        late.send(None)
