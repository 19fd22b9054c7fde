"""Absolute paths lead where they lead a program of the sandbox, and no further; and the workspace
has a second name, which programs may have for their home."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from providers.runtime.guest import protocol
from providers.runtime.guest.paths import METADATA_BYTES
from tests.support.kept_frames import Failed, Rooms
from tests.support.kept_guest import Guests

pytest_plugins = ["tests.providers.guest.room_fixtures"]
HOME = "/home/user"


@pytest.fixture(scope="module", params=["bubblewrap", "gvisor"])
def guests(request: pytest.FixtureRequest) -> Guests:
    found: Guests = request.getfixturevalue(f"_{request.param}_guests")
    return found


@pytest.fixture(scope="module")
def places(guests: Guests) -> Rooms:
    return Rooms(guests)


@pytest.fixture(autouse=True)
def emptied_places(places: Rooms) -> Iterator[None]:
    yield
    for folder in ("", "/tmp"):
        for entry in places.list(folder):
            places.call("file.remove", path=entry["path"])


def refused(rooms: Rooms, op: str, **header: object) -> tuple[str, str | None]:
    with pytest.raises(Failed) as caught:
        if op == "write":
            rooms.upload("file.write", [b"x"], **header)
        else:
            for _ in rooms.events(rooms.begin(f"file.{op}", credit=protocol.CREDIT, **header)):
                pass
    return caught.value.code, caught.value.field


def size_of(rooms: Rooms, path: str) -> int | None:
    """None for one that may not be read."""
    try:
        return len(rooms.read(path))
    except Failed:
        return None


# Attacks.

OF_HELPERS = [
    *("/proc/1/environ", "/proc/1/mem", "/proc/1/maps", "/proc/1/root/etc/passwd"),
    *("/proc/self/environ", "/proc/self/mem", "/proc/self/maps", "/proc/self/fd/3"),
    *("/proc/thread-self/environ", "/proc/self/task/../environ", "/proc/self/root/proc/self/maps"),
]


@pytest.mark.parametrize("path", OF_HELPERS)
def test_nothing_is_read_of_our_own_processes(places: Rooms, path: str) -> None:
    assert refused(places, "read", path=path) in (("refused", "path"), ("missing", "path"))


def test_nothing_is_read_of_our_own_processes_through_a_link(places: Rooms) -> None:
    places.shell("ln -s /proc/self/maps l; ln -s /proc/self d; ln -s /proc/1/environ one")
    for path in ("l", "d/maps", "one"):
        assert refused(places, "read", path=f"/workspace/{path}") == ("refused", "path")


def test_all_is_done_with_the_rights_of_a_program(places: Rooms) -> None:
    for path in ("/etc/passwd", "/usr/bin/env", "/proc/sys/kernel/hostname", "/x", "/etc/new"):
        assert refused(places, "write", path=path)[0] in ("refused", "missing"), path
    for path in ("/usr", "/etc/passwd", "/workspace", "/home/user", "/tmp", "/proc/1", "/dev/null"):
        assert refused(places, "remove", path=path)[0] in ("refused", "missing"), path
        assert refused(places, "move", path=path, target="/tmp/moved")[0] == "refused", path
        assert places.call("file.stat", path="/tmp/moved")["entry"] is None, path
    for path in ("/", "//", "/."):
        for op in ("remove", "write", "mkdir", "read"):
            assert refused(places, op, path=path)[0] == "refused", (op, path)
    assert places.shell("test -x /usr/bin/env && test -d /tmp && echo there") == "there\n"


@pytest.mark.parametrize(
    "path", ["/etc/../etc/passwd", "/..", "/tmp/../x", "/a\0b", "/" + "d/" * 65]
)
def test_what_is_no_path_is_refused(places: Rooms, path: str) -> None:
    for op in ("list", "stat", "read", "write", "mkdir", "move", "remove", "watch", "pack"):
        assert refused(places, op, path=path, target="t") == ("refused", "path"), op


def test_what_never_ends_and_what_makes_wait_is_not_opened(places: Rooms) -> None:
    places.shell("mkfifo /tmp/pipe; ln -s pipe /tmp/link; ln -s /dev/zero /tmp/zero")
    for path in ("/dev/zero", "/dev/random", "/dev/tty", "/dev/stdin", "/tmp/pipe", "/tmp/link"):
        assert refused(places, "read", path=path)[0] in ("refused", "missing"), path
        assert refused(places, "write", path=path)[0] in ("refused", "missing"), path
    assert refused(places, "read", path="/tmp/zero")[0] == "refused"
    assert places.call("file.stat", path="/tmp")["entry"]["type"] == "directory"


def test_files_of_the_kernel_are_read_and_are_bounded(places: Rooms) -> None:
    # As a program sees them, where it may.
    assert places.read("/proc/version").startswith(b"Linux")
    assert b"processor" in places.read("/proc/cpuinfo")
    files = [entry["path"] for entry in places.list("/proc") if entry["type"] == "file"]
    sizes = [size for path in files if (size := size_of(places, path)) is not None]
    assert max(sizes) <= 1024 * 1024


def test_a_link_that_flips_leads_to_a_file_of_the_user_or_to_none(places: Rooms) -> None:
    places.shell("mkdir /tmp/in; echo inside >/tmp/in/f")
    script = "while :; do ln -sfn /proc/self/environ /tmp/f; ln -sfn in/f /tmp/f; done"
    flipping = places.spawn(shell=script)
    seen, codes = set(), set()
    for _ in range(150):
        try:
            seen.add(places.read("/tmp/f"))
        except Failed as failed:
            codes.add(failed.code)
    places.call("signal", pid=flipping, signal="SIGKILL")
    assert seen <= {b"inside\n"}
    assert codes <= {"missing", "refused"}


CHAIN = "import os\nfor n in range({0}): os.symlink({1!r} + f'l{{n + 1}}', f'l{{n}}')"


@pytest.mark.parametrize(("count", "way"), [(1200, ""), (60, "x/../" * 800)])
def test_links_that_lead_on_and_on_hold_up_nothing(places: Rooms, count: int, way: str) -> None:
    places.shell("mkdir -p /tmp/chain/x; echo end >/tmp/chain/end; ln -s end /tmp/chain/link")
    places.shell(f'cd /tmp/chain; ln -s end l{count}; python3 -c "{CHAIN.format(count, way)}"')
    helper = places.call("file.stat", path="/proc/self")["entry"]["target"]
    told = {each["path"]: each for each in places.list("/tmp/chain")}
    assert told["/tmp/chain/link"]["end"]["path"] == "/tmp/chain/end"
    # As for a shell, to which they are too many.
    assert "end" not in told["/tmp/chain/l0"]
    assert "end" not in places.call("file.stat", path="/tmp/chain/l0")["entry"]
    for op in ("read", "write"):
        assert refused(places, op, path="/tmp/chain/l0") == ("refused", "path"), op
    # The process that works on files is still the same.
    assert places.call("file.stat", path="/proc/self")["entry"]["target"] == helper


def test_an_archive_names_nothing_outside_its_folder(places: Rooms) -> None:
    import io
    import tarfile

    for name in ("/tmp/out", "../out"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        with pytest.raises(Failed):
            places.upload("file.unpack", [packed.getvalue()], path="/tmp/into")
    assert places.shell("ls /tmp/out /tmp/into/tmp 2>/dev/null; true") == ""


def test_listing_the_root_tells_of_no_more_than_may_be(places: Rooms) -> None:
    names = {entry["path"] for entry in places.list("/")}
    assert {"/tmp", "/workspace", "/home", "/usr", "/proc"} <= names
    # A program's folders in /proc come and go while they are listed, and some are closed.
    assert len(places.list("/", depth=2)) > len(names)
    assert len(places.list("/proc", depth=8)) > 100


# What it is for.


def test_files_are_put_and_had_wherever_a_program_has_them(places: Rooms) -> None:
    entry = places.write("/tmp/a/b", b"content")
    assert (entry["path"], entry["size"]) == ("/tmp/a/b", 7)
    assert places.shell("cat /tmp/a/b; stat -c %a /tmp/a/b") == "content644\n"
    assert places.read("/tmp/a/b", offset=3) == b"tent"
    assert [each["path"] for each in places.list("/tmp", depth=2)] == ["/tmp/a", "/tmp/a/b"]
    assert places.call("file.mkdir", path="/tmp/c/d")["found"] is False
    assert places.call("file.mkdir", path="/tmp/c/d")["found"] is True
    assert places.call("file.move", path="/tmp/a/b", target="/tmp/c/e")["entry"]["size"] == 7
    packed = b"".join(places.stream("file.pack", path="/tmp/c"))
    assert places.upload("file.unpack", [packed], path="/dev/shm/x")["count"] == 2
    assert places.read("/dev/shm/x/e") == b"content"
    for path in ("/dev/shm/x", "/tmp/c", "/tmp/a"):
        assert places.call("file.remove", path=path)["found"] is True
    assert places.call("file.remove", path="/tmp/c")["found"] is False
    assert places.list("/tmp") == []


def test_a_link_on_the_way_and_at_the_end_is_followed_as_by_a_shell(places: Rooms) -> None:
    places.shell("mkdir /tmp/d; echo f >/tmp/d/f; ln -s /tmp/d out; ln -s out/f file; ln -s no no")
    assert places.read("/workspace/out/f") == places.read("/workspace/file") == b"f\n"
    assert places.list("/workspace/out")[0]["path"] == "/workspace/out/f"
    places.write("/workspace/file", b"new")
    assert places.shell("cat /tmp/d/f; test -L file && echo link") == "newlink\n"
    told = {each["path"]: each for each in places.list("/workspace")}
    assert told["/workspace/file"]["end"] == {"path": "/tmp/d/f", "type": "file", "mode": 0o644}
    assert told["/workspace/out"]["end"]["type"] == "directory"
    assert "end" not in told["/workspace/no"]
    assert refused(places, "write", path="/workspace/no") == ("refused", "path")
    # A link itself goes, and not what it leads to.
    assert places.call("file.remove", path="/workspace/out")["found"] is True
    assert places.shell("cat /tmp/d/f") == "new"


def test_what_is_moved_to_another_file_system_is_there_whole(places: Rooms) -> None:
    places.shell("mkdir -p d/in; head -c 300000 /dev/zero >d/in/f; ln -s f d/in/l; chmod 750 d/in")
    before = places.shell("cd d; find . -printf '%p %m %s %l\n' | grep -v '^. ' | sort")
    assert places.call("file.move", path="d", target="/tmp/d")["entry"]["type"] == "directory"
    assert (
        places.shell("cd /tmp/d; find . -printf '%p %m %s %l\n' | grep -v '^. ' | sort") == before
    )
    assert places.call("file.stat", path="d")["entry"] is None
    assert (
        places.call("file.move", path="/tmp/d/in/f", target="/dev/shm/f")["entry"]["size"] == 300000
    )
    assert places.call("file.remove", path="/dev/shm/f")["found"] is True
    # What cannot be there whole is not there, and stays where it was.
    places.shell("mkfifo /tmp/d/pipe")
    assert refused(places, "move", path="/tmp/d", target="e") == ("refused", "path")
    assert refused(places, "move", path="/tmp/d/in/l", target="/usr/l")[1] == "target"
    assert [each["path"] for each in places.list() if each["path"] != "artifacts"] == []
    assert {each["path"] for each in places.list("/tmp/d")} == {"/tmp/d/in", "/tmp/d/pipe"}


def test_a_folder_elsewhere_is_watched(places: Rooms) -> None:
    places.call("file.mkdir", path="/tmp/w")
    watch = places.begin("file.watch", path="/tmp/w", credit=protocol.CREDIT)
    assert places.event(watch)[0]["event"] == "ready"
    places.write("/tmp/w/new", b"x")
    header, parts = places.event(watch, 30)
    first = json.loads(parts["data"])[0]
    assert (header["event"], first["type"], first["path"]) == ("changes", "created", "/tmp/w/new")
    places.send({"op": "stop", "target": watch})


def test_a_command_begins_in_any_folder(places: Rooms) -> None:
    for folder in ("/", "/tmp", "/usr/bin"):
        assert places.shell("pwd; /bin/pwd", cwd=folder) == f"{folder}\n{folder}\n"
    with pytest.raises(Failed) as caught:
        places.spawn("true", cwd="/nowhere")
    assert (caught.value.code, caught.value.field) == ("missing", "cwd")


def metadata_of(places: Rooms, path: str) -> object:
    return places.call("file.stat", path=path)["entry"].get("metadata")


def test_the_metadata_of_a_file_stays_with_it(places: Rooms) -> None:
    metadata = {"author": "me"}
    assert places.write("/tmp/f", b"x", metadata=metadata)["metadata"] == metadata
    moved = places.call("file.move", path="/tmp/f", target="/tmp/g")["entry"]
    assert moved["metadata"] == metadata
    # A program moves it, and changes it in its place.
    places.shell("mv /tmp/g /tmp/h; echo more >> /tmp/h")
    assert metadata_of(places, "/tmp/h") == metadata
    assert "metadata" not in places.write("/tmp/h", b"y")
    assert metadata_of(places, "/tmp/h") is None


def test_another_file_of_the_same_name_has_no_metadata(places: Rooms) -> None:
    places.write("/tmp/f", b"x", metadata={"author": "me"})
    places.shell("rm /tmp/f; echo new > /tmp/f")
    assert metadata_of(places, "/tmp/f") is None


def test_metadata_takes_a_bounded_amount_of_memory(places: Rooms) -> None:
    large = {"text": "x" * 20_000}
    with pytest.raises(Failed) as caught:
        for number in range(METADATA_BYTES // 20_000 + 1):
            places.write(f"/tmp/{number}", b"x", metadata=large)
    assert (caught.value.code, caught.value.field) == ("exhausted", "metadata")
    assert refused(places, "write", path="/tmp/more", metadata=large) == ("exhausted", "metadata")
    assert refused(places, "read", path="/tmp/more") == ("missing", "path")
    # The metadata of a file that is gone makes room.
    places.shell("rm /tmp/0")
    assert places.write("/tmp/more", b"x", metadata=large)["metadata"] == large
    assert metadata_of(places, "/tmp/1") == large


# The home.


def test_the_workspace_has_two_names(places: Rooms) -> None:
    places.write(f"{HOME}/f", b"x")
    assert places.read("f") == places.read("/workspace/f") == b"x"
    assert places.shell("pwd; echo $HOME") == "/workspace\n/workspace\n"
    assert places.shell(f"cd {HOME} && /bin/pwd") == f"{HOME}\n"


def test_programs_that_are_to_have_it_for_their_home_are_there(guests: Guests) -> None:
    guest = guests.warm()
    assert not guest.keep(environment={"HOME": HOME}).failed
    code = "import os\nprint(os.getcwd(), os.path.expanduser('~'), os.environ['PWD'])"
    assert guest.run(code).stdout == f"{HOME} {HOME} {HOME}\n"
    for language in ("bash", "nodejs"):
        if guest.ask("context.create", language=language, context=language).failed:
            continue
        code = "pwd; /bin/pwd" if language == "bash" else "console.log(process.cwd())"
        assert set(guest.run(code, context=language).stdout.split()) == {HOME}
    assert not guest.ask("context.create", language="bash", context="in", cwd="a/b").failed
    assert guest.run("pwd; /bin/pwd", context="in").stdout == f"{HOME}/a/b\n" * 2
    assert not guest.ask("context.create", language="python", context="out", cwd="/tmp").failed
    assert guest.run("import os\nprint(os.getcwd())", context="out").stdout == "/tmp\n"
    guest.run("open('made', 'w').write('x')")
    guest.ask("context.restart", context="default")
    assert guest.run("import os\nprint(os.getcwd(), os.listdir('.'))").stdout.startswith(HOME)


def test_what_changes_below_either_name_is_told(places: Rooms) -> None:
    mark = places.changes().mark
    places.shell(f"echo x >{HOME}/new; echo y >/workspace/other")
    assert places.changes(mark).names == {"new", "other"}


def test_a_write_through_a_mapping_below_the_other_name_is_told(places: Rooms) -> None:
    places.write("m", bytes(8192))
    code = (
        f"import mmap\nf = open('{HOME}/m', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()\n"
        "print('mapped', flush=True); input(); m[0] = 2; print('written', flush=True); input()"
    )
    pid = places.spawn("python3", "-c", code, stdin=True)
    following = places.begin("follow", pid=pid, credit=protocol.CREDIT)
    assert places.event(following)[1]["data"] == b"mapped\n"
    mark = places.changes().mark
    places.call("stdin", {"data": b"\n"}, pid=pid)
    assert places.event(following)[1]["data"] == b"written\n"
    assert "m" in places.changes(mark, thorough=True).names
    places.call("signal", pid=pid, signal="SIGKILL")


def test_a_sandbox_of_its_own_has_its_own_home(guests: Guests) -> None:
    first, second = Rooms(guests), Rooms(guests)
    first.write(f"{HOME}/mine", b"x")
    assert f"{HOME}/mine" in {each["path"] for each in first.list(HOME)}
    assert f"{HOME}/mine" not in {each["path"] for each in second.list(HOME)}
