"""What a program does so that a change is not told, or told wrongly: it is told as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from providers.runtime.guest import protocol
from providers.runtime.guest.paths import MOST_DEPTH
from tests.providers.guest.kept_changes import THOROUGH, listed, replay, settled
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]
pytestmark = pytest.mark.usefixtures("emptied")


@THOROUGH
def test_names_of_any_bytes_are_told_as_they_are(rooms: Rooms, thorough: bool) -> None:
    names = ["new\nline", "\udcff\udcfe", " ", "-rf", "é", "\\", '"', "\x01\x7f", "x" * 255]
    mark = settled(rooms)
    for name in names:
        rooms.write(f"{name}/{name}", b"content")
    told = rooms.changes(mark, thorough=thorough)
    assert set(told.entries) == {path for name in names for path in (name, f"{name}/{name}")}
    assert rooms.chosen(*told.entries) == {
        path: b"content" if "/" in path else None for path in told.entries
    }
    for name in names:
        rooms.call("file.remove", path=name)
    assert set(rooms.changes(told.mark, thorough=thorough).removed) == set(told.entries)


@THOROUGH
def test_a_change_that_keeps_size_and_times_is_told(rooms: Rooms, thorough: bool) -> None:
    rooms.shell("echo 1 >f; touch -d 2020-01-01 f")
    mark = settled(rooms)
    rooms.shell("echo 2 >f; touch -d 2020-01-01 f")
    assert rooms.changes(mark, thorough=thorough).names == {"f"}


@THOROUGH
def test_a_file_that_changes_under_the_look_is_told_the_next_time(
    rooms: Rooms, thorough: bool
) -> None:
    """However short the time between what is seen and what is done: the last is never missed."""
    code = (
        "import os\nwhile True:\n"
        " line = os.read(0, 64)\n"
        " if not line: break\n"
        " fd = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        " for n in range(400): os.pwrite(fd, b'%03d' % n, 0)\n"
        " os.close(fd); print(flush=True)"
    )
    pid = rooms.spawn("python3", "-c", code, stdin=True)
    following = rooms.begin("follow", pid=pid, credit=protocol.CREDIT)
    mark = settled(rooms)
    known = b""
    for _ in range(8):
        rooms.call("stdin", {"data": b"go\n"}, pid=pid)
        has_ended = False
        while not has_ended:
            # Before the look: what has ended by then is there for it to see.
            has_ended = rooms.has_arrived(following)
            told = rooms.changes(mark, thorough=thorough)
            mark = told.mark
            if "f" in told.names:
                known = rooms.read("f")
        assert rooms.event(following)[1]["data"] == b"\n"
        assert known == b"399"
        rooms.shell("rm f")
        assert rooms.changes(mark, thorough=thorough).names == {"-f"}
    rooms.call("signal", pid=pid, signal="SIGKILL")


@THOROUGH
def test_the_other_name_of_a_file_is_told_with_it(rooms: Rooms, thorough: bool) -> None:
    rooms.shell("mkdir a b; echo 1 >a/f; ln a/f b/g")
    mark = settled(rooms)
    rooms.shell("echo 22 >b/g")
    told = rooms.changes(mark, thorough=thorough)
    assert told.names == {"a/f", "b/g"}
    rooms.shell("sleep 0.05; rm b/g; echo 333 >a/f")
    assert {"a/f", "-b/g"} <= rooms.changes(told.mark, thorough=thorough).names


def test_a_link_to_a_file_that_was_alone_is_looked_at_from_then_on(rooms: Rooms) -> None:
    rooms.shell("mkdir a b; echo 1 >a/f")
    mark = settled(rooms)
    rooms.shell("ln a/f b/g")
    mark = rooms.changes(mark).mark
    rooms.shell("sleep 0.05; echo 22 >b/g")
    assert {"a/f", "b/g"} <= rooms.changes(mark).names


def test_what_is_written_through_memory_is_told_by_a_thorough_look(rooms: Rooms) -> None:
    rooms.shell("head -c 8192 /dev/zero >m")
    code = (
        "import mmap\nf = open('m', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); m[0] = 1\n"
        "for line in open(0):\n m[0] += 1; print('written', flush=True)\n"
        "m[4096]; m[4096] = 1; m.close(); print('closed', flush=True)\nimport time; time.sleep(60)"
    )
    pid = rooms.spawn("python3", "-c", code, stdin=True)
    following = rooms.begin("follow", pid=pid, credit=protocol.CREDIT)
    mark = ""
    for _ in range(2):
        rooms.call("stdin", {"data": b"\n"}, pid=pid)
        assert rooms.event(following)[1]["data"] == b"written\n"
        told = rooms.changes(mark, thorough=True)
        assert "m" in told.names
        mark = settled(rooms)
    # That the kernel says nothing of it is why: whoever is told by it has not looked at all.
    assert rooms.changes(mark).names == set()
    rooms.call("stdin", pid=pid, close=True)
    assert rooms.event(following)[1]["data"] == b"closed\n"
    # Once it is closed the kernel says so.
    assert rooms.changes(mark).names == {"m"}
    rooms.call("signal", pid=pid, signal="SIGKILL")


def test_a_folder_that_is_closed_keeps_what_was_known_of_it(rooms: Rooms) -> None:
    rooms.shell("mkdir -p d/in; touch d/in/f")
    mark = settled(rooms)
    rooms.shell("chmod 0 d")
    for thorough in (False, True):
        assert rooms.changes(mark, thorough=thorough).names == {"d"}
    assert rooms.changes(mark).unseen == ["d"]
    rooms.shell("chmod 700 d; rm d/in/f")
    told = rooms.changes(mark)
    assert (told.names, told.unseen) == ({"d", "-d/in/f"}, [])


def test_what_was_never_seen_is_said_not_to_be_seen(open_rooms: Callable[..., Rooms]) -> None:
    """As of a files' process that is new, which knows nothing."""
    rooms = open_rooms()
    rooms.shell(
        "mkdir -p d/in \"$(printf 'b\\377')\" r; touch d/in/f r/f; chmod 0 d b*; chmod 400 r"
    )
    told = rooms.changes()
    assert (told.complete, told.unseen) == (True, ["b\udcff", "d", "r"])
    assert not {"d/in", "d/in/f"} & told.names
    # A folder that is closed as soon as it is made, in one that is new.
    rooms.shell("chmod 700 b* r; mkdir -p n/c; touch n/c/f; chmod 0 n/c")
    told = rooms.changes(told.mark)
    assert told.unseen == ["d", "n/c"]
    assert told.names >= {"n", "n/c", "r/f"}
    rooms.shell("chmod 700 d n/c")
    told = rooms.changes(told.mark)
    assert (told.unseen, told.names) == ([], {"d", "d/in", "d/in/f", "n/c", "n/c/f"})
    rooms.shell("for n in $(seq 60); do mkdir $n; chmod 0 $n; done")
    assert rooms.changes(told.mark).unseen == [""]


DEEPER = "p=.; for n in $(seq {depth}); do mkdir $p/d; cd $p/d; done; "


def test_what_is_too_deep_to_be_told_is_said_not_to_be_seen(rooms: Rooms) -> None:
    last = "/".join(["d"] * MOST_DEPTH)
    rooms.shell(DEEPER.format(depth=MOST_DEPTH))
    mark = settled(rooms)
    assert rooms.changes(mark).unseen == []
    for thorough in (False, True):
        rooms.shell(f"mkdir -p {last} && cd {last} && touch f")
        assert rooms.changes(mark, thorough=thorough).unseen == [last]
        rooms.shell(f"rm {last}/f")
        assert rooms.changes(mark, thorough=thorough).unseen == []
    # All of it at once, in a folder that is new.
    rooms.shell("mkdir n; cd n; " + DEEPER.format(depth=MOST_DEPTH + 3))
    assert rooms.changes(mark).unseen == ["n/" + "/".join(["d"] * (MOST_DEPTH - 1))]


def test_below_a_name_that_is_too_long_nothing_is_said_to_be_seen(rooms: Rooms) -> None:
    folder = "x" * 250
    above = "/".join([folder] * 16)
    rooms.shell(f"for n in $(seq 16); do mkdir {folder}; cd {folder}; done; touch near")
    mark = settled(rooms)
    rooms.shell(f"cd {above}; touch {'y' * 250}; rm near")
    told = rooms.changes(mark)
    assert (told.unseen, told.names) == ([above], {f"-{above}/near"})
    rooms.shell(f"cd {above}; rm y*")
    assert rooms.changes(told.mark).unseen == []


@THOROUGH
def test_a_folder_that_becomes_a_link_leads_nowhere(rooms: Rooms, thorough: bool) -> None:
    rooms.shell("mkdir -p /tmp/o/in d/in; echo outside >/tmp/o/in/secret; echo inside >d/in/f")
    flipping = rooms.spawn(
        shell="while :; do mv d e; ln -s /tmp/o d; touch d/in/f; rm d; mv e d; echo x >>d/in/f; done"
    )
    mark = ""
    for _ in range(30):
        told = rooms.changes(mark, thorough=thorough)
        assert not [path for path in told.entries if "secret" in path or path == "in"]
        mark = told.mark
    rooms.call("signal", pid=flipping, signal="SIGKILL")
    rooms.shell("rm -rf /tmp/o")


def test_a_tree_that_changes_meanwhile_comes_to_what_is_there(rooms: Rooms) -> None:
    churn = (
        "import os, random\nfor n in range(6000):\n"
        "  a, b = random.choice('abc') + str(n % 7), random.choice('abc') + str(n % 5)\n"
        "  try: random.choice([lambda: os.mkdir(a), lambda: os.rename(a, b), "
        "lambda: os.rename(a, b + '/' + a), lambda: os.rmdir(a), lambda: open(a + '/f', 'a').write('x'), "
        "lambda: os.link(a + '/f', b + '/g'), lambda: os.unlink(a + '/g')])()\n"
        "  except OSError: pass"
    )
    pid = rooms.spawn("python3", "-c", churn)
    model: dict[str, tuple[object, ...]] = {}
    mark, runs = "", True
    while runs:
        processes = rooms.call("process.list")["processes"]
        runs = any(each["pid"] == pid and each["exit_code"] is None for each in processes)
        told = rooms.changes(mark)
        replay(model, told.entries, told.removed, complete=told.complete)
        mark = told.mark
    assert model == listed(rooms)


def test_more_than_can_be_remembered_is_refused_and_told(
    open_rooms: Callable[..., Rooms],
) -> None:
    rooms = open_rooms()
    name = "x" * 250
    deep = f"import os\nfor _ in range(15): os.mkdir({name!r}); os.chdir({name!r})\nfor n in range(1500): open(str(n), 'w')"
    rooms.follow(rooms.spawn("python3", "-c", deep))
    with pytest.raises(Failed, match="characters") as caught:
        rooms.changes()
    assert (caught.value.code, caught.value.field) == ("refused", "path")
    rooms.call("file.remove", path=name)
    assert rooms.changes().names == {"artifacts"}


def test_what_a_program_calls_as_ours_is_not_told(rooms: Rooms) -> None:
    mark = settled(rooms)
    rooms.shell("mkdir .cofferdam-mine; touch .cofferdam-mine/f .cofferdam-f seen.cofferdam-")
    for thorough in (False, True):
        assert rooms.changes(mark, thorough=thorough).names == {"seen.cofferdam-"}


def test_programs_have_no_notices_of_their_own(rooms: Rooms) -> None:
    rooms.changes()
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.inotify_init1(0), ctypes.get_errno() == 38)\n"
        "for pid in [each for each in os.listdir('/proc') if each.isdigit()]:\n"
        "  try: links = [os.readlink(f'/proc/{pid}/fd/{fd}') for fd in os.listdir(f'/proc/{pid}/fd')]\n"
        "  except OSError: continue\n"
        "  print(any('inotify' in link for link in links))\n"
        "print(any(libc.inotify_add_watch(fd, b'/dev/null', 2) >= 0 for fd in range(256)))"
    )
    expected = {"-1 True", "False"}
    assert set(rooms.shell(f'python3 -c "{code}"').splitlines()) == expected
    pid = rooms.spawn("python3", "-c", code)
    assert set(rooms.follow(pid)[0]["stdout"].decode().splitlines()) == expected
