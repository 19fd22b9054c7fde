"""The files of a kept sandbox: what is done to them, and what a program cannot make of that."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from providers.runtime.guest import protocol
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]
pytestmark = pytest.mark.usefixtures("emptied")


def refused(rooms: Rooms, op: str, **header: object) -> tuple[str, str | None]:
    with pytest.raises(Failed) as caught:
        if op == "file.write":
            rooms.upload(op, [], **header)
        else:
            for _ in rooms.events(rooms.begin(op, **header)):
                pass
    return caught.value.code, caught.value.field


# Attacks.

PATHS = [
    "..",
    "a/../..",
    "/etc/../etc/passwd",
    "/..",
    "a\0b",
    7,
    None,
    ["a"],
    "x" * 256,
    "d/" * 65,
    "\ud800",
]
OPERATIONS = ["list", "stat", "read", "write", "mkdir", "move", "remove", "watch", "pack", "unpack"]


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_what_is_no_path_is_refused(rooms: Rooms, op: str, path: object) -> None:
    if path == "\ud800":
        path = "a\ud800"
    assert refused(rooms, f"file.{op}", path=path, target="t", credit=1) == ("refused", "path")


@pytest.mark.parametrize("path", ["..", "/tmp/../x", "a\0", "", None])
def test_what_is_no_target_of_a_move_is_refused(rooms: Rooms, path: object) -> None:
    rooms.write("a", b"")
    assert refused(rooms, "file.move", path="a", target=path) == ("refused", "target")


@pytest.mark.parametrize("op", ["read", "write", "mkdir", "move", "remove"])
def test_the_workspace_itself_is_no_file(rooms: Rooms, op: str) -> None:
    assert refused(rooms, f"file.{op}", path="./", target="t", credit=1) == ("refused", "path")


def test_no_link_is_followed_out_of_the_workspace_or_within_it(rooms: Rooms) -> None:
    rooms.shell("mkdir -p /tmp/out real; echo secret >/tmp/out/file; echo x >real/file")
    rooms.shell("ln -s /tmp/out out; ln -s /tmp/out/file file; ln -s real inner; ln -s self self")
    for path in ("out/file", "inner/file", "self/x"):
        for op in ("list", "stat", "read", "write", "mkdir", "remove", "move", "pack", "unpack"):
            said = refused(rooms, f"file.{op}", path=path, target="t", credit=1)
            assert said == ("refused", "path"), (op, path)
        assert refused(rooms, "file.move", path="real", target=f"{path}2")[1] == "target"
    for path in ("file", "out", "self"):
        for op in ("read", "write", "list", "pack", "watch"):
            assert refused(rooms, f"file.{op}", path=path, credit=1)[0] == "refused", (op, path)
    assert {entry["path"]: entry["target"] for entry in rooms.list(depth=9)} == {
        "file": "/tmp/out/file",
        "out": "/tmp/out",
        "inner": "real",
        "self": "self",
        "real": "",
        "real/file": "",
    }
    # The link goes, not what it says.
    assert rooms.call("file.remove", path="out")["found"] is True
    assert rooms.shell("cat /tmp/out/file") == "secret\n"


def test_a_folder_that_becomes_a_link_leads_nowhere(rooms: Rooms) -> None:
    rooms.shell("mkdir -p /tmp/o/in d/in; echo outside >/tmp/o/in/f; echo inside >d/in/f")
    flipping = rooms.spawn(shell="while :; do mv d e; ln -s /tmp/o d; rm d; mv e d; done")
    seen, codes = set(), set()
    for _ in range(150):
        try:
            seen.add(rooms.read("d/in/f"))
        except Failed as failed:
            codes.add(failed.code)
    rooms.call("signal", pid=flipping, signal="SIGKILL")
    assert seen <= {b"inside\n"}
    assert codes <= {"missing", "refused"}


def test_pipes_sockets_and_devices_are_neither_waited_for_nor_opened(rooms: Rooms) -> None:
    rooms.shell("mkfifo pipe; python3 -c 'import socket; socket.socket(1).bind(\"sock\")'")
    for name in ("pipe", "sock"):
        assert rooms.call("file.stat", path=name)["entry"]["type"] == "other"
        for op in ("read", "write", "list"):
            assert refused(rooms, f"file.{op}", path=name, credit=1) == ("refused", "path")
    assert rooms.call("file.move", path="pipe", target="pipe2")["entry"]["type"] == "other"
    assert rooms.call("file.remove", path="pipe2")["found"] is True


def test_a_sparse_petabyte_is_read_as_far_as_the_credit_goes(
    open_rooms: Callable[..., Rooms],
) -> None:
    size = 1 << 50
    rooms = open_rooms(file_bytes=size)
    rooms.shell(f"truncate -s {size} huge")
    assert rooms.call("file.stat", path="huge")["entry"]["size"] == size
    number = rooms.begin("file.read", path="huge", credit=300_000)
    got = 0
    while got + protocol.CHUNK_BYTES + 5 * protocol.EVENT_COST < 300_000:
        got += len(rooms.event(number)[1]["data"])
    assert rooms.read("huge", offset=size - 5) == bytes(5)
    rooms.send({"op": "stop", "target": number})
    assert rooms.event(number)[0]["event"] == "done"
    # It never has all of it.
    assert got < 300_000


def test_a_file_that_grows_for_ever_has_an_end(rooms: Rooms) -> None:
    rooms.shell("head -c 1000000 /dev/zero >growing")
    growing = rooms.spawn(shell="while :; do head -c 100000 /dev/zero >>growing; sleep 0.01; done")
    for _ in range(5):
        assert len(rooms.read("growing")) >= 1_000_000
    rooms.call("signal", pid=growing, signal="SIGKILL")


NAMES = ["new\nline", "\udcff\udcfe", " ", "-rf", "é", "\\", '"', "\x01\x7f", "x" * 255]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_goes_there_and_back(rooms: Rooms, name: str) -> None:
    assert rooms.write(f"{name}/{name}", b"content")["path"] == f"{name}/{name}"
    assert [entry["path"] for entry in rooms.list(depth=2)] == [name, f"{name}/{name}"]
    assert rooms.read(f"{name}/{name}") == b"content"
    assert rooms.call("file.move", path=name, target="plain")["entry"]["path"] == "plain"
    assert [entry["path"] for entry in rooms.list("plain")] == [f"plain/{name}"]


def test_a_folder_of_many_is_listed_in_pieces(rooms: Rooms) -> None:
    count = 12_000  # what the sandbox has inodes for
    rooms.shell(f"mkdir many; cd many; seq -f %0100.0f {count} | xargs touch")
    number = rooms.begin("file.list", path="many", credit=protocol.CREDIT)
    paths = []
    for header, parts in rooms.events(number):
        assert len(parts.get("data", b"")) <= protocol.CHUNK_BYTES
        if header["event"] == "done":
            assert header["count"] == count
    paths = [entry["path"] for entry in rooms.list("many")]
    assert paths == sorted(paths)
    assert len(set(paths)) == count
    assert rooms.call("file.remove", path="many")["found"] is True
    assert rooms.list() == []


def test_a_workspace_without_room_for_anything_can_be_emptied(
    open_rooms: Callable[..., Rooms],
) -> None:
    rooms = open_rooms(workspace_bytes=1 << 20)
    rooms.shell("mkdir -p a/b full; head -c 2M /dev/zero >a/b/f; seq 20000 | xargs touch; true")
    rooms.follow(rooms.spawn(shell="cd full; seq 20000 | xargs touch"))
    assert refused(rooms, "file.mkdir", path="more")[0] == "exhausted"
    for path in ("a", "full"):
        assert rooms.call("file.remove", path=path)["found"] is True
    assert rooms.call("file.mkdir", path="more")["found"] is False


def test_a_tree_that_changes_meanwhile_is_listed_and_removed(rooms: Rooms) -> None:
    rooms.shell("mkdir tree; cd tree; mkdir -p $(seq 50); touch keep")
    churn = "import os\nwhile True:\n for n in range(50):\n  try: os.rename(f'tree/{n}', f'tree/{n}x'); os.rename(f'tree/{n}x', f'tree/{n}')\n  except OSError: pass"
    churning = rooms.spawn("python3", "-c", churn)
    for _ in range(20):
        paths = [entry["path"] for entry in rooms.list(depth=3)]
        assert "tree/keep" in paths
        assert len(paths) == len(set(paths))
    rooms.call("signal", pid=churning, signal=9)
    assert rooms.call("file.remove", path="tree")["found"] is True


def test_a_very_deep_tree_and_closed_folders_are_removed(rooms: Rooms) -> None:
    deep = "import os\nfor _ in range(2000):\n os.mkdir('d'); os.chdir('d')\nopen('f', 'w')"
    rooms.follow(rooms.spawn("python3", "-c", deep))
    rooms.shell(
        "mkdir -p closed/a/b; touch closed/a/b/f; chmod 0 closed/a/b closed/a; chmod 500 closed"
    )
    assert refused(rooms, "file.list", path="d", depth=65, credit=1)[1] == "depth"
    assert len(rooms.list(depth=64)) > 64
    for path in ("d", "closed"):
        assert rooms.call("file.remove", path=path)["found"] is True
    assert rooms.list() == []


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", True, 1 << 63])
def test_what_is_no_number_is_refused(rooms: Rooms, field: str, value: object) -> None:
    rooms.write("f", b"x")
    assert refused(rooms, "file.read", path="f", credit=1000, **{field: value})[1] == field


@pytest.mark.parametrize("mode", [-1, 0o4755, 0o1777, "644", True])
def test_only_ordinary_modes_are_given(rooms: Rooms, mode: object) -> None:
    assert refused(rooms, "file.write", path="f", mode=mode) == ("refused", "mode")


def test_who_sends_more_than_agreed_has_nothing_written(rooms: Rooms) -> None:
    number = rooms.begin("file.write", path="f")
    rooms.send({"op": "data", "target": number}, [("data", bytes(protocol.CHUNK_BYTES + 1))])
    with pytest.raises(Failed, match="can take"):
        rooms.event(number)
    assert rooms.list() == []


def test_a_file_is_no_larger_than_the_sandbox_allows(open_rooms: Callable[..., Rooms]) -> None:
    small = open_rooms(file_bytes=100_000)
    with pytest.raises(Failed) as caught:
        small.write("f", bytes(200_000))
    assert caught.value.code == "exhausted"
    assert [entry["path"] for entry in small.list()] == ["artifacts"]


# What it is for.


def test_a_written_file_is_whole_or_the_former_one(rooms: Rooms) -> None:
    rooms.write("folder/f", b"former", mode=0o750)
    number = rooms.begin("file.write", path="folder/f")
    rooms.send({"op": "data", "target": number}, [("data", b"half")])
    assert rooms.event(number)[0]["event"] == "taken"
    assert rooms.read("folder/f") == b"former"
    rooms.send({"op": "stop", "target": number})
    assert rooms.event(number)[0]["event"] == "done"
    assert [entry["path"] for entry in rooms.list("folder")] == ["folder/f"]
    # The mode stays that of the former one, and the program sees what was written.
    entry = rooms.write("folder/f", b"new")
    assert (entry["type"], entry["size"], entry["mode"]) == ("file", 3, 0o750)
    assert rooms.shell("cat folder/f; stat -c %a folder/f") == "new750\n"
    assert rooms.call("file.stat", path="folder/f")["entry"] == entry


def test_parts_of_a_file_are_read(rooms: Rooms) -> None:
    content = bytes(range(256)) * 1000
    rooms.write("f", content)
    assert rooms.read("f") == content
    assert rooms.read("f", offset=100_000, length=10) == content[100_000:100_010]
    assert rooms.read("f", offset=1 << 40) == b""
    assert rooms.read("f", length=0) == b""


def test_what_is_not_there_is_said_to_be_missing(rooms: Rooms) -> None:
    assert rooms.call("file.stat", path="no/where")["entry"] is None
    assert rooms.call("file.remove", path="no/where")["found"] is False
    for op in ("list", "read", "move", "watch", "pack"):
        said = refused(rooms, f"file.{op}", path="nowhere", target="t", credit=1)
        assert said == ("missing", "path")
    rooms.write("f", b"")
    assert refused(rooms, "file.move", path="f", target="no/t") == ("missing", "target")


def test_folders_are_made_and_found(rooms: Rooms) -> None:
    assert rooms.call("file.mkdir", path="a/b/c")["found"] is False
    assert rooms.call("file.mkdir", path="a/b")["found"] is True
    rooms.write("f", b"")
    assert refused(rooms, "file.mkdir", path="f") == ("refused", "path")
    assert refused(rooms, "file.mkdir", path="f/g") == ("refused", "path")
    assert [entry["path"] for entry in rooms.list(depth=2)] == ["a", "a/b", "f"]


def test_a_move_replaces_a_file_by_a_file_and_nothing_else(rooms: Rooms) -> None:
    rooms.write("f", b"f")
    rooms.write("g", b"g")
    rooms.shell("mkdir d e; ln -s f l")
    for source, target in (
        ("f", "d"),
        ("d", "e"),
        ("d", "f"),
        ("f", "l"),
        ("l", "f"),
        ("d", "d/x"),
    ):
        assert refused(rooms, "file.move", path=source, target=target) == ("refused", "target")
    assert rooms.call("file.move", path="f", target="g")["entry"]["size"] == 1
    assert rooms.read("g") == b"f"
    assert rooms.call("file.move", path="d", target="e/d")["entry"]["type"] == "directory"


# Watching.


def changes(rooms: Rooms, number: int, count: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    while len(found) < count:
        header, parts = rooms.event(number)
        assert header["event"] == "changes"
        for each in json.loads(parts["data"].decode("utf-8", "surrogateescape")):
            found.append((each["type"], each["path"], *filter(None, [each.get("former")])))
    assert len(found) == count, found
    return found


def test_changes_are_told_until_the_watch_is_stopped(rooms: Rooms) -> None:
    rooms.shell("mkdir -p w/in; touch w/in/old; echo outside >other")
    number = rooms.begin("file.watch", path="w", credit=protocol.CREDIT)
    assert rooms.event(number)[0]["event"] == "ready"
    rooms.write("w/in/new\udcff", b"")
    new = "w/in/new\udcff"
    assert changes(rooms, number, 3) == [
        ("created", new),
        ("modified", new),
        ("attributes", new),
    ]
    rooms.shell("echo more >>w/in/old")
    assert changes(rooms, number, 1) == [("modified", "w/in/old")]
    rooms.shell("mv w/in w/out; echo unseen >other")
    assert changes(rooms, number, 1) == [("moved", "w/out", "w/in")]
    rooms.call("file.remove", path="w/out/old")
    assert changes(rooms, number, 1) == [("deleted", "w/out/old")]
    rooms.send({"op": "stop", "target": number})
    assert rooms.event(number)[0]["event"] == "done"


def test_a_watch_without_credit_waits_and_loses_nothing(rooms: Rooms) -> None:
    number = rooms.begin("file.watch", path="", credit=protocol.EVENT_COST)
    assert rooms.event(number)[0]["event"] == "ready"
    rooms.shell("mkdir $(seq -w 20)")
    rooms.send({"op": "credit", "target": number, "bytes": protocol.CREDIT})
    assert changes(rooms, number, 20) == [("created", f"{n:02}") for n in range(1, 21)]
    rooms.send({"op": "stop", "target": number})


def test_a_watched_folder_that_goes_and_too_many_watches_are_told(rooms: Rooms) -> None:
    rooms.shell("mkdir gone")
    numbers = [rooms.begin("file.watch", path="gone", credit=1000) for _ in range(9)]
    for number in numbers[:8]:
        assert rooms.event(number)[0]["event"] == "ready"
    with pytest.raises(Failed) as caught:
        rooms.event(numbers[8])
    assert caught.value.code == "exhausted"
    rooms.shell("rmdir gone")
    for number in numbers[:8]:
        with pytest.raises(Failed) as caught:
            rooms.event(number)
        assert caught.value.code == "missing"
