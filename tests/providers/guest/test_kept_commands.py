"""Commands in a kept sandbox: started, followed, fed, signalled, ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from providers.runtime.guest import protocol, wire
from tests.support.kept_frames import Failed, Rooms
from tests.support.processes import ROOT

pytest_plugins = ["tests.providers.guest.room_fixtures"]


def refused(rooms: Rooms, op: str, **header: object) -> tuple[str, str | None]:
    with pytest.raises(Failed) as caught:
        rooms.call(op, **header)
    return caught.value.code, caught.value.field


def until(rooms: Rooms, number: int, text: bytes) -> bytes:
    """What a follower is sent until `text` is in it."""
    got = b""
    while text not in got:
        header, parts = rooms.event(number)
        assert header["event"] != "done", got
        got += parts["data"]
    return got


def following(rooms: Rooms, pid: int, after: int = 0) -> int:
    return rooms.begin("follow", pid=pid, after=after, credit=protocol.CREDIT)


def state(rooms: Rooms, pid: int) -> dict[str, Any] | None:
    listed = rooms.call("process.list")["processes"]
    return next((each for each in listed if each["pid"] == pid), None)


# What is asked for wrongly.

WRONG = {
    "argv": [
        {},
        {"argv": [], "shell": ""},
        {"argv": ["a"], "shell": "b"},
        {"argv": ["a\0"]},
        {"argv": "ls"},
        {"argv": [1]},
        {"argv": [""]},
        {"argv": ["a\ud800"]},
    ],
    "shell": [{"shell": 1}, {"shell": "a\0b"}],
    "cwd": [{"shell": "true", "cwd": cwd} for cwd in ("..", "/tmp/..", "a\0", 7)],
    "environment": [
        {"shell": "true", "environment": given}
        for given in ([1], {"a": 1}, {"": "x"}, {"a=b": "x"}, {"a": "\0"})
    ],
    "user": [{"shell": "true", "user": user} for user in ("root", "0", "nobody", 5)],
    "pty": [{"shell": "true", "pty": pty} for pty in ([80], [0, 1], [80, 70_000], "x", [1.5, 2])],
    "timeout": [{"shell": "true", "timeout": given} for given in (0, -1, "1", True, 1e300)],
}


@pytest.mark.parametrize(
    ("field", "header"), [(field, header) for field, all_ in WRONG.items() for header in all_]
)
def test_what_is_wrong_is_named(rooms: Rooms, field: str, header: dict[str, Any]) -> None:
    assert refused(rooms, "spawn", **header) == ("refused", field)


def test_what_cannot_be_started_says_why(rooms: Rooms) -> None:
    rooms.shell("touch plain; mkdir -p folder; ln -sfn folder link")
    before = len(rooms.call("process.list")["processes"])
    assert refused(rooms, "spawn", argv=["no-such-program"]) == ("missing", "argv")
    assert refused(rooms, "spawn", argv=["./plain"]) == ("refused", "argv")
    assert refused(rooms, "spawn", argv=["true"], cwd="nowhere") == ("missing", "cwd")
    assert refused(rooms, "spawn", argv=["true"], cwd="plain") == ("refused", "cwd")
    assert refused(rooms, "spawn", argv=["true"], cwd="link") == ("refused", "cwd")
    assert refused(rooms, "spawn", argv=["true", "x" * 200_000]) == ("refused", "argv")
    assert len(rooms.call("process.list")["processes"]) == before


@pytest.mark.parametrize("pid", [0, 10_000, -1, "1", None, True])
def test_a_process_that_is_not_there_is_missing(rooms: Rooms, pid: object) -> None:
    rooms.shell("true")
    for op, more in (
        *(("follow", {"credit": 1}), ("signal", {"signal": 9}), ("stdin", {})),
        ("resize", {"columns": 80, "rows": 24}),
    ):
        assert refused(rooms, op, pid=pid, **more) == ("missing", "pid")


@pytest.mark.parametrize("signal", [0, -1, 65, "TERM", "SIG_IGN", "SIGNO", "KILL", None, True])
def test_what_is_no_signal_is_refused(rooms: Rooms, signal: object) -> None:
    pid = rooms.spawn("true")
    assert refused(rooms, "signal", pid=pid, signal=signal) == ("refused", "signal")


# What it is for.


def test_arguments_folder_environment_and_user_are_as_asked(rooms: Rooms) -> None:
    rooms.shell("mkdir -p a/b")
    name = rooms.shell("id -un").strip()
    for user in ("", name, rooms.shell("id -u").strip()):
        script = 'pwd; echo "$0 $1 $SPECIAL"; exit 3'
        argv = ["bash", "-c", script, "zero", "a b\n\udcff"]
        pid = rooms.spawn(*argv, cwd="a/b", environment={"SPECIAL": "é"}, user=user)
        streams, process = rooms.follow(pid)
        assert streams["stdout"] == b"/workspace/a/b\nzero a b\n\xff \xc3\xa9\n"
        assert (process["exit_code"], process["ended_by_us"]) == (3, "")
        assert (process["argv"], process["cwd"]) == (argv, "a/b")


def test_a_command_has_the_bounds_of_code(rooms: Rooms) -> None:
    code = "import resource as r; print([r.getrlimit(k) for k in (r.RLIMIT_NOFILE, r.RLIMIT_CORE, r.RLIMIT_FSIZE, r.RLIMIT_MSGQUEUE)])"
    bounds = json.loads(rooms.shell(f"python3 -c '{code}'").translate(str.maketrans("()", "[]")))
    assert bounds[:2] == [[256, 256], [1, 1]]
    assert bounds[3] == [0, 0]
    # Nothing of the supervisor's is open in it.
    assert rooms.shell("ls /proc/self/fd | wc -l") == "4\n"
    assert "denied" in rooms.shell("cat /proc/1/environ 2>&1 || true")
    assert rooms.shell("kill -9 1; unshare -m true 2>&1 || true")


def test_streams_come_in_their_order_with_their_positions(rooms: Rooms) -> None:
    script = "for n in 1 2 3; do printf o$n; read x; printf e$n >&2; read x; done"
    pid = rooms.spawn(shell=script, stdin=True)
    number, got = following(rooms, pid), []
    for _ in range(6):
        header, parts = rooms.event(number)
        got.append((header["at"], header["event"], parts["data"]))
        rooms.call("stdin", {"data": b"\n"}, pid=pid)
    assert rooms.event(number)[0]["event"] == "done"
    kinds = [("stdout", b"o1"), ("stderr", b"e1"), ("stdout", b"o2"), ("stderr", b"e2")]
    kinds += [("stdout", b"o3"), ("stderr", b"e3")]
    assert got == [(2 * n, *kind) for n, kind in enumerate(kinds)]
    # Whoever comes later has the same, from where he left off.
    assert rooms.follow(pid, after=5)[0] == {"stdout": b"2o3", "stderr": b"e2e3"}
    assert rooms.follow(pid, after=10_000)[0] == {"stdout": b"", "stderr": b""}


def test_several_follow_one_process_and_one_may_leave(rooms: Rooms) -> None:
    pid = rooms.spawn(shell="read x; echo got $x", stdin=True)
    first, second = following(rooms, pid), following(rooms, pid)
    rooms.send({"op": "stop", "target": first})
    assert rooms.event(first)[0]["process"]["exit_code"] is None
    rooms.call("stdin", {"data": b"it\n"}, pid=pid)
    assert until(rooms, second, b"it\n") == b"got it\n"
    assert rooms.event(second)[0]["process"]["exit_code"] == 0


def test_whoever_may_be_sent_nothing_waits_for_the_end(rooms: Rooms) -> None:
    pid = rooms.spawn(shell="read x; head -c 1000000 /dev/zero; exit 4", stdin=True)
    waiting = rooms.begin("follow", pid=pid)
    rooms.call("stdin", pid=pid, close=True)
    assert rooms.event(waiting)[0]["process"]["exit_code"] == 4


def test_all_output_reaches_a_follower_that_reads_slowly(rooms: Rooms) -> None:
    """The process waits for him; what nobody follows is dropped, but for the last of it."""
    size = 8 * 2**20
    pid = rooms.spawn(shell=f"read x; head -c {size} /dev/zero", stdin=True)
    follower = following(rooms, pid)
    rooms.call("stdin", pid=pid, close=True)
    got = sum(len(parts.get("data", b"")) for _, parts in rooms.events(follower))
    assert got == size
    streams, _ = rooms.follow(pid)
    assert 0 < len(streams["stdout"]) <= protocol.KEPT_OUTPUT_BYTES
    alone = rooms.spawn(shell=f"head -c {size} /dev/zero; printf end")
    streams, _ = rooms.follow(alone, after=size - 100)
    assert streams["stdout"].endswith(bytes(100) + b"end")


def test_the_input_waits_for_room_and_then_for_its_end(rooms: Rooms) -> None:
    pid = rooms.spawn(shell="read go; wc -c", stdin=True)
    rooms.call("stdin", {"data": b"go\n"}, pid=pid)
    slow = rooms.spawn(shell="sleep 1000", stdin=True)
    piece = bytes(protocol.CHUNK_BYTES)
    waiting = [rooms.begin("stdin", {"data": piece}, pid=slow) for _ in range(4)]
    for _ in range(40):
        rooms.call("stdin", {"data": piece}, pid=pid)
    rooms.call("stdin", pid=pid, close=True)
    assert rooms.follow(pid)[0]["stdout"].strip() == str(40 * len(piece)).encode()
    # The first filled the pipe of the one that does not read; the others can be taken back.
    assert rooms.event(waiting[0])[0]["event"] == "done"
    rooms.send({"op": "stop", "target": waiting[1]})
    assert rooms.event(waiting[1])[0]["event"] == "done"
    rooms.call("signal", pid=slow, signal="SIGKILL")
    with pytest.raises(Failed):
        rooms.event(waiting[2])


def test_what_reads_no_input_or_has_none_is_told(rooms: Rooms) -> None:
    pid = rooms.spawn(shell="cat; sleep 1000")
    assert refused(rooms, "stdin", pid=pid) == ("refused", "pid")
    assert refused(rooms, "resize", pid=pid, columns=80, rows=24) == ("refused", "pid")
    rooms.call("signal", pid=pid, signal=9)
    closed = rooms.spawn(shell="exec <&-; echo closed; sleep 1000", stdin=True)
    until(rooms, following(rooms, closed), b"closed")
    number = rooms.begin("stdin", {"data": b"x"}, pid=closed)
    with pytest.raises(Failed, match="no more"):
        rooms.event(number)
    large = rooms.begin("stdin", {"data": bytes(protocol.CHUNK_BYTES + 1)}, pid=closed)
    with pytest.raises(Failed) as caught:
        rooms.event(large)
    assert caught.value.field == "data"
    rooms.call("signal", pid=closed, signal=9)


def test_a_terminal_has_its_size_its_keys_and_its_end(rooms: Rooms) -> None:
    # The traps start no program: the key would interrupt it, as it is in the terminal's group.
    script = """trap 'echo resized' WINCH; trap 'echo interrupted' INT; tty; stty size
        while read x; do echo got $x; done; stty size; echo end"""
    pid = rooms.spawn(shell=script, pty=[100, 30])
    follower = following(rooms, pid)
    first = until(rooms, follower, b"30 100\r\n")
    assert first.startswith(b"/dev/terminals/")
    rooms.call("stdin", {"data": b"line\n"}, pid=pid)
    until(rooms, follower, b"got line")
    rooms.call("resize", pid=pid, columns=90, rows=20)
    rooms.call("stdin", {"data": b"\x03"}, pid=pid)
    until(rooms, follower, b"interrupted")
    rooms.call("stdin", pid=pid, close=True)
    rest = b"".join(parts.get("data", b"") for _, parts in rooms.events(follower))
    assert b"20 90\r\nend" in rest
    assert b"resized" in rooms.follow(pid)[0]["stdout"]


def test_so_many_commands_have_a_terminal_and_programs_have_theirs_all_the_same(
    rooms: Rooms,
) -> None:
    pids = [rooms.spawn("cat", pty=[80, 24]) for _ in range(16)]
    try:
        assert refused(rooms, "spawn", argv=["cat"], pty=[80, 24]) == ("exhausted", "pty")
        assert rooms.shell("python3 -c 'import os; os.openpty(); print(1)'") == "1\n"
    finally:
        for pid in pids:
            rooms.call("signal", pid=pid, signal=9)


def test_a_signal_reaches_the_whole_group_and_nobody_once_it_has_ended(rooms: Rooms) -> None:
    pid = rooms.spawn(shell="trap 'echo caught; exit 5' TERM; sleep 1000 & echo ready; wait")
    follower = following(rooms, pid)
    until(rooms, follower, b"ready")
    assert rooms.call("signal", pid=pid, signal="SIGTERM")["found"] is True
    *_, (done, _) = rooms.events(follower)
    assert done["process"]["exit_code"] == 5
    assert rooms.call("signal", pid=pid, signal=15)["found"] is False
    # SIGTERM was for its child as well.
    assert rooms.shell("pgrep -x sleep -f 'sleep 1000' || true") == ""
    killed = rooms.spawn("sleep", "1000")
    rooms.call("signal", pid=killed, signal=9)
    assert rooms.follow(killed)[1]["exit_code"] == 137


def test_a_deadline_ends_the_command_and_what_came_from_it(rooms: Rooms) -> None:
    script = "trap '' TERM INT HUP; setsid sleep 7777 & (sleep 7778 &) ; kill -STOP $$; echo never"
    streams, process = rooms.follow(rooms.spawn(shell=script, timeout=0.5))
    assert (process["exit_code"], process["ended_by_us"]) == (137, "timeout")
    assert streams["stdout"] == b""
    assert rooms.shell("pgrep -f '^sleep 777' || true") == ""
    assert rooms.follow(rooms.spawn("true", timeout=600))[1]["ended_by_us"] == ""


# Each outlives its parent, in a session of its own.
DAEMONS = (
    "(setsid sleep 7779 >/dev/null 2>&1 &)",
    "(setsid sh -c 'sleep 7779 & sleep 7779' &)",
    "(setsid env -i /bin/sh -c 'nohup sleep 7779 & exec sleep 7779' &)",
    "python3 -c 'import os\nfor _ in range(2):\n    if os.fork(): os._exit(0)\n    os.setsid()\n"
    'os.execlp("sleep", "sleep", "7779")\'',
)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_deadline_ends_what_was_daemonised(rooms: Rooms, daemon: str) -> None:
    others = rooms.spawn(shell="(setsid sleep 7780 &) ; sleep 7781")
    there = "until pgrep -f '^sleep 7779' >/dev/null; do sleep 0.1; done"
    script = f"{daemon}; {there}; echo there; sleep 7782"
    streams, process = rooms.follow(rooms.spawn(shell=script, timeout=5))
    assert (process["ended_by_us"], streams["stdout"]) == ("timeout", b"there\n")
    assert rooms.shell("pgrep -f '^sleep 77(79|82)' || true") == ""
    # Another command's is not its.
    assert rooms.shell("pgrep -f '^sleep 778[01]' | wc -l") == "2\n"
    rooms.call("signal", pid=others, signal=9)
    rooms.shell("pkill -f '^sleep 7780'")


def test_what_a_command_leaves_in_the_background_goes_on(rooms: Rooms) -> None:
    pid = rooms.spawn(
        shell="(while [ ! -e go ]; do sleep 0.02; done; echo later; touch gone) & echo now"
    )
    streams, process = rooms.follow(pid)
    assert (streams["stdout"], process["exit_code"]) == (b"now\n", 0)
    rooms.shell("touch go; while [ ! -e gone ]; do sleep 0.02; done")
    assert rooms.follow(pid)[0]["stdout"] == b"now\nlater\n"


def test_numbers_are_not_used_twice_and_the_last_that_ended_are_listed(
    open_rooms: Callable[..., Rooms],
) -> None:
    rooms = open_rooms()
    stays = rooms.spawn("sleep", "1000")
    pids = [rooms.spawn("true") for _ in range(70)]
    assert len({stays, *pids}) == 71
    for pid in pids[-64:]:
        rooms.follow(pid)
    listed = [each["pid"] for each in rooms.call("process.list")["processes"]]
    assert listed == [stays, *pids[-64:]]
    assert refused(rooms, "follow", pid=pids[0], credit=1) == ("missing", "pid")


# Attacks.


def test_so_many_processes_and_no_more(open_rooms: Callable[..., Rooms]) -> None:
    rooms = open_rooms(processes=1000)
    pids = [rooms.spawn("sleep", "1000") for _ in range(protocol.MOST_PROCESSES)]
    assert refused(rooms, "spawn", argv=["true"])[0] == "exhausted"
    rooms.call("signal", pid=pids[0], signal="SIGKILL")
    rooms.follow(pids[0])
    assert rooms.spawn("true") == pids[-1] + 1


# In a process of its own: in this one, pools of other tests open and close descriptors meanwhile.
TOO_FEW_DESCRIPTORS = """
import os
from unittest.mock import Mock
from providers.runtime.guest import command
before = os.listdir("/proc/self/fd")
wanted = command.Wanted()
wanted.stdin, wanted.pty = True, {pty}
wanted.argv, wanted.cwd, wanted.timeout = ["true"], [], None
command.resource.getrlimit = lambda _: (20, 20)
os.fork = lambda: print("a fork, with too little left for it")
try:
    command.Command(Mock(), {{"uid": None}}, wanted, Mock())
except OSError as error:
    print(error.strerror)
print(os.listdir("/proc/self/fd") == before)
"""


@pytest.mark.parametrize("pty", [None, (80, 24)])
def test_descriptors_run_out_before_the_supervisor_needs_them(pty: tuple[int, int] | None) -> None:
    """What commands leave in the background keeps their pipes open."""
    code = TOO_FEW_DESCRIPTORS.format(pty=pty)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["Too many open files", "True"]


def test_a_fork_bomb_leaves_the_supervisor_able_to_answer(open_rooms: Callable[..., Rooms]) -> None:
    rooms = open_rooms(processes=40)
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    pid = rooms.spawn("python3", "-c", bomb, timeout=3)
    codes = set()
    for _ in range(30):
        try:
            rooms.follow(rooms.spawn("true"))
        except Failed as failed:
            codes.add(failed.code)
    assert codes <= {"exhausted"}
    assert rooms.write("f", b"x")["size"] == 1
    assert rooms.follow(pid)[1]["ended_by_us"] == "timeout"
    rooms.call("reset")
    assert rooms.shell("echo fine") == "fine\n"


def test_floods_that_nobody_reads_hold_up_nothing(open_rooms: Callable[..., Rooms]) -> None:
    """Neither many bytes nor many small pieces fill the supervisor's memory."""
    rooms = open_rooms()
    pids = [rooms.spawn(shell="yes & yes >&2") for _ in range(4)]
    tiny = "import os\nwhile True: os.write(1, b'a'); os.write(2, b'b')"
    pids += [rooms.spawn("python3", "-c", tiny) for _ in range(4)]
    stuck = rooms.begin("follow", pid=pids[0], credit=100_000)
    for _ in range(3):
        assert rooms.shell("echo fine") == "fine\n"
    follower = following(rooms, pids[-1])
    got = 0
    while got < 3000:
        got += len(rooms.event(follower)[1]["data"])
        rooms.send({"op": "credit", "target": follower, "bytes": 70_000})
    peak = int(rooms.shell("grep VmHWM /proc/1/status").split()[1])
    assert peak < 80_000
    assert rooms.event(stuck)[0]["event"] in ("stdout", "stderr")
    rooms.call("reset")


def test_the_list_fits_a_header_whatever_the_arguments_are(
    open_rooms: Callable[..., Rooms],
) -> None:
    rooms = open_rooms(processes=1000)
    for _ in range(60):
        rooms.spawn("sleep", "1000", "\x01" * 20_000, *["\x01"] * 900)
    listed = rooms.call("process.list")
    assert len(wire.dumps(listed).encode()) < wire.HEADER_LIMIT
    assert {tuple(each["argv"])[:2] for each in listed["processes"]} == {("sleep", "1000")}


def test_what_stops_itself_before_or_after_its_start_can_be_ended(rooms: Rooms) -> None:
    pid = rooms.spawn(shell="kill -STOP $$")
    rooms.call("signal", pid=pid, signal="SIGKILL")
    assert rooms.follow(pid)[1]["exit_code"] == 137
    left = state(rooms, pid)
    assert left is not None
    assert left["exit_code"] == 137


def test_a_pipe_that_outlives_its_process_holds_nobody_up(rooms: Rooms) -> None:
    """Its other end lies in a message that nobody receives."""
    code = (
        "import os, socket, time\n"
        "a, b = socket.socketpair()\n"
        "socket.send_fds(a, [b'x'], [1])\n"
        "print('sent', flush=True)\n"
        "if os.fork() == 0: os.setsid(); time.sleep(1000)\n"
    )
    streams, process = rooms.follow(rooms.spawn("python3", "-c", code))
    assert (streams["stdout"], process["exit_code"]) == (b"sent\n", 0)


def test_the_working_folder_is_in_the_environment(rooms: Rooms) -> None:
    rooms.call("file.mkdir", path="a/b")
    pid = rooms.spawn("python3", "-c", "import os; print(os.environ['PWD'])", cwd="a/b")
    assert rooms.follow(pid)[0]["stdout"] == b"/workspace/a/b\n"
    given = rooms.spawn("printenv", "PWD", environment={"PWD": "/own"})
    assert rooms.follow(given)[0]["stdout"] == b"/own\n"
