"""Commands and files where the supervisor is root and programs are not, on gVisor's own kernel."""

from __future__ import annotations

import pytest

from providers.runtime.guest import protocol
from tests.support.kept_frames import Failed, Rooms
from tests.support.kept_guest import Guests

pytest_plugins = ["tests.providers.guest.room_fixtures"]


@pytest.fixture(scope="module")
def rooms(_gvisor_guests: Guests) -> Rooms:
    return Rooms(_gvisor_guests)


def test_a_command_is_the_programs_user_and_cannot_reach_the_supervisor(rooms: Rooms) -> None:
    assert rooms.shell("id -u") != "0\n"
    assert rooms.shell("kill -9 1 2>&1 || echo refused").endswith("refused\n")
    pid = rooms.spawn(shell="read x; echo got $x; echo err >&2; exit 3", stdin=True)
    rooms.call("stdin", {"data": b"it\n"}, pid=pid)
    streams, process = rooms.follow(pid)
    assert (streams, process["exit_code"]) == ({"stdout": b"got it\n", "stderr": b"err\n"}, 3)
    assert rooms.follow(rooms.spawn("sleep", "1000", timeout=0.3))[1]["ended_by_us"] == "timeout"


def test_a_deadline_ends_what_was_daemonised(rooms: Rooms) -> None:
    script = "(setsid env -i /bin/sh -c 'sleep 7779 & exec sleep 7779' &); sleep 7782"
    assert rooms.follow(rooms.spawn(shell=script, timeout=3))[1]["ended_by_us"] == "timeout"
    assert rooms.shell("pgrep -f '^sleep 77' || true") == ""


def test_a_terminal_hears_of_its_size(rooms: Rooms) -> None:
    script = "trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.1; done"
    pid = rooms.spawn(shell=script, pty=[100, 30])
    number = rooms.begin("follow", pid=pid, credit=protocol.CREDIT)
    got = b""
    while b"30 100" not in got:
        got += rooms.event(number)[1]["data"]
    rooms.call("resize", pid=pid, columns=90, rows=20)
    streams, _ = rooms.follow(pid)
    assert b"20 90" in streams["stdout"]


def test_files_have_the_programs_rights_and_no_link_is_followed(rooms: Rooms) -> None:
    rooms.write("d/f", bytes(300_000), mode=0o640)
    assert rooms.shell("stat -c '%a %U' d/f; id -un").split()[1:] != ["root"]
    rooms.shell(
        "ln -s /etc out; ln -s /etc/passwd file; ln -s d inner; mkdir -p deep/er; touch deep/er/x"
    )
    for path in ("out", "file", "out/passwd", "inner/f"):
        for op in ("read", "list", "write", "pack"):
            with pytest.raises(Failed) as caught:
                rooms.event(rooms.begin(f"file.{op}", path=path, credit=protocol.CREDIT))
            assert (caught.value.code, caught.value.field) == ("refused", "path")
    assert len(rooms.read("d/f")) == 300_000
    made = b"".join(rooms.stream("file.pack", path=""))
    assert (
        rooms.upload(
            "file.unpack",
            [made[at : at + 65536] for at in range(0, len(made), 65536)],
            path="again",
        )["count"]
        == 9
    )
    for entry in rooms.list():
        rooms.call("file.remove", path=entry["path"])
    assert rooms.list() == []


def test_changes_are_told_by_the_notices_of_its_own_kernel(rooms: Rooms) -> None:
    rooms.shell("mkdir -p d/in; echo 1 >d/in/f; echo 2 >d/in/g; head -c 8192 /dev/zero >m")
    assert rooms.changes().complete
    mark = rooms.changes(thorough=True).mark
    code = (
        "import mmap\nf = open('m', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); m[0] = 1\n"
        "print('mapped', flush=True); input(); m[0] = 2; m.close(); print('closed', flush=True)\n"
        "input()"
    )
    pid = rooms.spawn("python3", "-c", code, stdin=True)
    following = rooms.begin("follow", pid=pid, credit=protocol.CREDIT)
    assert rooms.event(following)[1]["data"] == b"mapped\n"
    # All three, and never what only a look at everything could tell.
    rooms.shell("rm d/in/g; echo more >>d/in/f; mkdir new; echo 3 >new/h")
    told = rooms.changes(mark)
    assert told.names - {"m"} == {"-d/in/g", "d/in/f", "new", "new/h"}
    mark = rooms.changes(told.mark).mark
    assert rooms.changes(mark).names == set()
    assert "m" in rooms.changes(mark, thorough=True).names
    mark = rooms.changes(mark).mark
    rooms.call("stdin", {"data": b"\n"}, pid=pid)
    assert rooms.event(following)[1]["data"] == b"closed\n"
    assert rooms.changes(mark).names == {"m"}
    rooms.call("stdin", pid=pid, close=True)
    assert rooms.chosen("d/in/f", "gone", "new") == {"d/in/f": b"1\nmore\n", "new": None}
    for entry in rooms.list():
        rooms.call("file.remove", path=entry["path"])
    assert rooms.changes(mark).entries == {}
