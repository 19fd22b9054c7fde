"""What becomes of operations on files when the process that does them is killed, stopped, busy."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from providers.runtime.guest import files, protocol
from tests.providers.guest.files_worker import worker
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]


def test_what_is_under_way_fails_when_its_process_is_killed(rooms: Rooms) -> None:
    rooms.write("f", bytes(3 * protocol.CREDIT))
    reading = rooms.begin("file.read", path="f", credit=10 * protocol.CHUNK_BYTES)
    for _ in range(9):
        rooms.event(reading)
    writing = rooms.begin("file.write", path="g")
    rooms.shell(f"kill -9 {worker(rooms)}")
    for number in (reading, writing):
        with pytest.raises(Failed, match="ended"):
            rooms.event(number)
    # Others are not concerned, and the next has another process.
    assert rooms.shell("echo fine") == "fine\n"
    assert len(rooms.read("f")) == 3 * protocol.CREDIT


def test_what_a_killed_process_was_writing_is_gone_with_the_next_operation(rooms: Rooms) -> None:
    name = f".cofferdam-{'0a' * 8}"
    rooms.shell(f"mkdir -p a/b deep/{name}/0 && touch deep/{name}/0/f && ln -s deep {name}")
    # What only looks like one of ours is not.
    rooms.shell("touch .cofferdam-notes a/.cofferdam-0123 a/mine")
    writing = rooms.begin("file.write", path="a/b/f")
    rooms.send({"op": "data", "target": writing}, [("data", b"half")])
    assert rooms.event(writing)[0]["event"] == "taken"
    assert "cofferdam" in rooms.shell("ls -A a/b")
    rooms.shell(f"kill -9 {worker(rooms)}")
    with pytest.raises(Failed, match="ended"):
        rooms.event(writing)
    rooms.write("other", b"x")
    left = rooms.shell("find . -name '.cofferdam-*' | sort").split()
    assert left == [f"./{name}", "./.cofferdam-notes", "./a/.cofferdam-0123"]
    assert rooms.shell("ls a/b a deep").split() == ["a:", "b", "mine", "a/b:", "deep:"]


def test_what_is_under_way_fails_when_its_process_is_stopped(rooms: Rooms) -> None:
    watching = rooms.begin("file.watch", path="", credit=protocol.CREDIT)
    assert rooms.event(watching)[0]["event"] == "ready"
    rooms.shell(f"kill -STOP {worker(rooms)}")
    stat = rooms.begin("file.stat", path="f")
    for number in (watching, stat):
        with pytest.raises(Failed, match="stopped"):
            rooms.event(number)
    assert rooms.call("file.stat", path="")["entry"]["type"] == "directory"


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    timers: list[tuple[float, Callable[[], None]]] = []
    loop = Mock(is_full=False)
    loop.at = lambda when, what: timers.append((when, what))
    operation = Mock(number=1)
    with subprocess.Popen(["sleep", "1000"]) as silent:
        monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(files.os, "fork", lambda: silent.pid)
        room = files.Files(loop, {})
        room.operations()["file.stat"](operation, {"op": "file.stat", "path": ""}, {})
        while timers:
            assert now[0] < 60
            operation.failed.assert_not_called()
            now[0], ring = timers.pop()
            ring()
    assert now[0] > files.ANSWER_SECONDS
    assert "in time" in operation.failed.call_args.args[0]
    assert silent.returncode == -9


def test_whoever_stops_something_does_not_wait_for_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = Mock(number=1)
    with subprocess.Popen(["sleep", "1000"]) as silent:
        monkeypatch.setattr(files.os, "fork", lambda: silent.pid)
        room = files.Files(Mock(is_full=False), {})
        room.operations()["file.watch"](operation, {"op": "file.watch", "path": ""}, {})
        operation.done.assert_not_called()
        operation.when_stopped()
        operation.done.assert_called_once_with()
        silent.kill()


def test_a_program_neither_reads_nor_writes_in_that_process(rooms: Rooms) -> None:
    number = worker(rooms)
    for what in ("mem", "maps", "environ", "fd/3", "cwd/f"):
        assert rooms.shell(f"cat /proc/{number}/{what} 2>&1 || true").count("Permission denied")


def test_modules_of_the_workspace_are_not_its_own(rooms: Rooms) -> None:
    for name in ("tarfile", "copy", "shutil", "archive"):
        rooms.write(f"{name}.py", b"open('/tmp/' + __name__, 'w')")
    watching = rooms.begin("file.watch", path="", credit=protocol.CREDIT)
    rooms.shell(f"kill -9 {worker(rooms)}")
    assert rooms.event(watching)[0]["event"] == "ready"
    with pytest.raises(Failed, match="ended"):
        rooms.event(watching)
    assert b"".join(rooms.stream("file.pack", path=""))
    assert rooms.shell("ls /tmp") == ""


def test_a_reset_ends_what_is_under_way_and_leaves_the_files(
    open_rooms: Callable[..., Rooms],
) -> None:
    rooms = open_rooms()
    rooms.write("f", b"kept")
    watching = rooms.begin("file.watch", path="", credit=protocol.CREDIT)
    assert rooms.event(watching)[0]["event"] == "ready"
    pid = rooms.spawn("sleep", "1000")
    following = rooms.begin("follow", pid=pid, credit=protocol.CREDIT)
    rooms.call("reset")
    with pytest.raises(Failed, match="reset"):
        rooms.event(watching)
    process = rooms.event(following)[0]["process"]
    assert (process["exit_code"], process["ended_by_us"]) == (137, "closed")
    assert rooms.call("process.list")["processes"] == []
    assert rooms.read("f") == b"kept"
    assert rooms.spawn("true") != pid


def test_many_operations_at_once_go_on_side_by_side(rooms: Rooms) -> None:
    """None of those that wait for credit holds up another."""
    rooms.write("f", bytes(2 * protocol.CREDIT))
    waiting = [rooms.begin("file.read", path="f", credit=70_000) for _ in range(60)]
    writing = [rooms.begin("file.write", path=f"w{n}") for n in range(20)]
    for number in waiting:
        assert len(rooms.event(number)[1]["data"]) == protocol.CHUNK_BYTES
    assert len(rooms.read("f")) == 2 * protocol.CREDIT
    for number in writing:
        rooms.send({"op": "end", "target": number})
        assert rooms.event(number)[0]["event"] == "done"
    for number in waiting:
        rooms.send({"op": "stop", "target": number})
        assert rooms.event(number)[0]["event"] == "done"


@pytest.mark.parametrize("amount", [50 * 2**20])
def test_large_files_go_through_in_constant_memory(
    open_rooms: Callable[..., Rooms], amount: int
) -> None:
    rooms = open_rooms()
    piece = bytes(range(256)) * (protocol.CHUNK_BYTES // 256)
    count = amount // len(piece)
    done = rooms.upload("file.write", (piece for _ in range(count)), path="large")
    assert done["entry"]["size"] == amount
    for op in ("file.read", "file.pack"):
        path = "large" if op == "file.read" else ""
        assert sum(map(len, rooms.stream(op, path=path))) >= amount
    peak = rooms.shell(f"grep VmHWM /proc/1/status /proc/{worker(rooms)}/status").split()
    assert max(int(word) for word in peak if word.isdigit()) < 40_000
