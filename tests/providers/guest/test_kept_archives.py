"""Folders go in and out of a kept sandbox as tar archives, and nothing leaves them."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator

import pytest

from providers.runtime.guest import protocol
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]
pytestmark = pytest.mark.usefixtures("emptied")


def member(
    name: str, content: bytes | None = None, **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content or b"")
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content or b""


def archive(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:  # noqa: A002
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as written:
        for info, content in members:
            written.addfile(info, io.BytesIO(content))
    return file.getvalue()


def pieces(data: bytes, size: int = protocol.CHUNK_BYTES) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def unpack(rooms: Rooms, data: bytes, path: str = "", size: int = protocol.CHUNK_BYTES) -> int:
    count: int = rooms.upload("file.unpack", pieces(data, size), path=path)["count"]
    return count


def packed(rooms: Rooms, path: str = "") -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(b"".join(rooms.stream("file.pack", path=path))))


# Attacks.

OUTSIDE = {
    "above": [member("../x", b"x")],
    "above on the way": [member("a/../../x", b"x")],
    "absolute": [member("/tmp/x", b"x")],
    "a folder above": [member("..", type=tarfile.DIRTYPE)],
    "through a link": [
        member("l", type=tarfile.SYMTYPE, linkname="/tmp"),
        member("l/x", b"x"),
    ],
    "through a link to a folder": [
        member("l", type=tarfile.SYMTYPE, linkname="/tmp"),
        member("l", type=tarfile.DIRTYPE),
    ],
    "a hard link to what is outside": [
        member("x", type=tarfile.LNKTYPE, linkname="../../etc/passwd"),
    ],
    "a hard link through a link": [
        member("l", type=tarfile.SYMTYPE, linkname="/etc"),
        member("x", type=tarfile.LNKTYPE, linkname="l/passwd"),
    ],
    "a hard link to a link": [
        member("l", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("x", type=tarfile.LNKTYPE, linkname="l"),
    ],
    "a device": [member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "a pipe": [member("x", type=tarfile.FIFOTYPE)],
    "over a folder": [member("d/f", b""), member("d", b"x")],
    "no name": [member("./", b"x")],
}


@pytest.mark.parametrize("members", OUTSIDE.values(), ids=OUTSIDE)
def test_a_member_that_leads_elsewhere_is_refused(
    rooms: Rooms, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    with pytest.raises(Failed) as caught:
        unpack(rooms, archive(*members), "in")
    assert (caught.value.code, caught.value.field) == ("refused", "data")
    assert rooms.shell("ls /tmp") == ""
    assert {"x", "in/x"}.isdisjoint(entry["path"] for entry in rooms.list(depth=3))


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_lead_nowhere_else_either(rooms: Rooms, format: int) -> None:  # noqa: A002
    name = "d/" * 60 + "../" * 62 + "tmp/x"
    with pytest.raises(Failed):
        unpack(rooms, archive(member(name, b"x"), format=format))
    assert rooms.shell("ls /tmp") == ""


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(rooms: Rooms) -> None:
    rooms.shell("echo outside >/tmp/target; ln -s /tmp/target f")
    unpack(rooms, archive(member("f", b"inside")))
    assert rooms.shell("cat f /tmp/target; rm /tmp/target") == "insideoutside\n"


GOOD = archive(member("f", b"x" * 1000))
BROKEN = {
    "nothing": b"",
    "no archive": b"x" * 2000,
    "compressed": gzip.compress(GOOD * 100),
    "cut in a head": GOOD[:100],
    "cut in a file": GOOD[:1000],
    "cut before its end": GOOD[:1536],
    "a wrong sum": GOOD[:10] + b"y" + GOOD[11:],
    "less than no bytes": tarfile.TarInfo("f").tobuf()[:124],
    "says too much": archive(member("x" * 70_000, b""))[:2048],
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_no_whole_archive_is_refused(rooms: Rooms, data: bytes) -> None:
    with pytest.raises(Failed) as caught:
        unpack(rooms, data)
    assert (caught.value.code, caught.value.field) == ("refused", "data")
    # Half a file is not left behind.
    assert all(entry["size"] == 1000 for entry in rooms.list())


def test_a_promise_of_a_petabyte_takes_no_room(rooms: Rooms) -> None:
    info = tarfile.TarInfo("huge")
    info.size = 1 << 50
    with pytest.raises(Failed):
        unpack(rooms, info.tobuf(tarfile.PAX_FORMAT) + bytes(100_000))
    assert rooms.list() == []


def test_more_than_the_workspace_holds_is_told(open_rooms: Callable[..., Rooms]) -> None:
    small = open_rooms(workspace_bytes=1 << 20)
    with pytest.raises(Failed) as caught:
        unpack(small, archive(member("f", b"x" * (2 << 20))))
    assert caught.value.code == "exhausted"
    assert small.shell("echo fine") == "fine\n"


def test_pipes_and_sockets_are_left_out_and_counted(rooms: Rooms) -> None:
    rooms.shell("mkfifo p; touch f; python3 -c 'import socket; socket.socket(1).bind(\"s\")'")
    *_, (done, _) = rooms.events(rooms.begin("file.pack", path="", credit=protocol.CREDIT))
    assert (done["count"], done["skipped"]) == (1, 2)
    assert packed(rooms).getnames() == ["f"]


@pytest.mark.parametrize("script", ["touch f; chmod 0 f", "mkdir d; chmod 0 d"])
def test_what_cannot_be_read_is_not_silently_left_out(rooms: Rooms, script: str) -> None:
    rooms.shell(script)
    with pytest.raises(Failed, match="denied"):
        packed(rooms)


def test_a_tree_that_is_too_deep_is_told(rooms: Rooms) -> None:
    rooms.follow(
        rooms.spawn("python3", "-c", "import os\nfor _ in range(99): os.mkdir('d'); os.chdir('d')")
    )
    with pytest.raises(Failed, match="deeper"):
        packed(rooms)


def test_an_archive_of_what_changes_is_whole_or_refused(rooms: Rooms) -> None:
    rooms.shell("mkdir d; head -c 200000 /dev/zero >d/f")
    code = "import os\nwhile True: os.truncate('d/f', 0); os.truncate('d/f', 200000)"
    pid = rooms.spawn("python3", "-c", code)
    reasons: set[str] = set()
    for _ in range(20):
        try:
            with packed(rooms, "d") as made:
                assert made.getmember("f").size in (0, 200_000)
        except Failed as failed:
            reasons.add(failed.reason)
    rooms.call("signal", pid=pid, signal=9)
    assert reasons <= {"'f' became shorter while it was read."}


# What it is for.


def test_a_folder_goes_out_and_in_again_as_it_was(rooms: Rooms) -> None:
    script = (
        "mkdir -p one/deep/er; cd one; printf content >deep/file; ln -s ../nowhere deep/link;"
        "touch -d @1000000000 deep/file; chmod 750 deep/er; head -c 300000 /dev/urandom >large;"
        "printf x >$'new\\nline'; printf y >$'\\xff'; printf z >"
        + "n" * 200
        + "; ln deep/file hard"
    )
    rooms.shell(script)
    data = b"".join(rooms.stream("file.pack", path="one"))
    # However it is cut, and by whomever it was made.
    for number, size in enumerate((protocol.CHUNK_BYTES, 777)):
        count = unpack(rooms, data, f"in/{number}", size)
        assert count == 9
        listing = "find . -printf '%y %m %s %l %p\\n' | sort; md5sum */* * 2>/dev/null | sort"
        assert rooms.shell(f"cd in/{number}; {listing}").replace("in", "") == rooms.shell(
            f"cd one; {listing}"
        ).replace("in", "")
        assert rooms.shell(f"stat -c %Y in/{number}/deep/file") == "1000000000\n"


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_other_tools_are_unpacked(rooms: Rooms, format: int) -> None:  # noqa: A002
    long = "a" * 90 + "/" + "b" * 90
    data = archive(
        member("./", type=tarfile.DIRTYPE, mode=0o755),
        member("./dir/", type=tarfile.DIRTYPE, mode=0o500),
        member("./dir/f", b"first", mode=0o4711),
        member(long, b"long"),
        member("hard", type=tarfile.LNKTYPE, linkname="dir/f"),
        member("soft", type=tarfile.SYMTYPE, linkname="../../etc"),
        format=format,
    )
    assert unpack(rooms, data + bytes(50_000)) == 6
    assert rooms.read("dir/f") == rooms.read("hard") == b"first"
    assert rooms.read(long) == b"long"
    assert rooms.shell("stat -c %a dir/f; readlink soft") == "711\n../../etc\n"


def test_an_empty_folder_is_an_archive_too(rooms: Rooms) -> None:
    assert packed(rooms).getnames() == []
    assert unpack(rooms, archive()) == 0
