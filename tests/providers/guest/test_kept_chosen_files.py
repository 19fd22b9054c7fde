"""An archive of single paths has each as it was at one moment, and nothing of what was not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest

from providers.runtime.guest import chosen_files, protocol
from tests.providers.guest.files_worker import worker
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]
pytestmark = pytest.mark.usefixtures("emptied")

LARGE = 4 * chosen_files.AT_ONCE_BYTES


def test_each_path_is_there_by_itself_in_their_order(rooms: Rooms) -> None:
    rooms.shell("mkdir -p d/in; echo 1 >d/f; echo 2 >d/in/g; ln -s d/f l; : >empty")
    rooms.write("large", bytes(range(256)) * (LARGE // 256))
    names = ["l", "large", "d", "empty", "d/in/g"]
    made = rooms.chosen(*names)
    assert list(made) == names
    assert made["large"] == bytes(range(256)) * (LARGE // 256)
    assert [made[name] for name in ("l", "d", "empty", "d/in/g")] == ["d/f", None, b"", b"2\n"]


def test_what_is_gone_or_cannot_be_read_is_left_out(rooms: Rooms) -> None:
    rooms.shell("mkdir d; touch d/f closed f; chmod 0 closed; mkfifo p; ln -s d through")
    names = ["gone", "d/gone", "f/x", "closed", "p", "through/f", "f", "d/f"]
    assert rooms.chosen(*names) == {"f": b"", "d/f": b""}


def test_a_large_file_that_changes_while_it_is_read_is_dropped(rooms: Rooms) -> None:
    rooms.write("large", bytes(LARGE))
    rooms.shell("echo 1 >small")
    only = json.dumps(["large", "small"]).encode()
    number = rooms.begin("file.pack", {"only": only}, path="", credit=protocol.CHUNK_BYTES)
    assert rooms.event(number)[0]["event"] == "held"
    rooms.shell("printf x | dd of=large conv=notrunc status=none")
    rooms.send({"op": "credit", "target": number, "bytes": 2 * LARGE})
    events = [header for header, _ in rooms.events(number)]
    assert [each["event"] for each in events if each["event"] != "held"] == [
        *("dropped", "data", "done"),
    ]
    assert (events[-1]["count"], events[-1]["skipped"]) == (1, 1)


@pytest.mark.parametrize("change", ["truncate -s 10 large", "rm large; mkdir large"])
def test_a_large_file_that_goes_while_it_is_read_is_whole_or_dropped(
    rooms: Rooms, change: str
) -> None:
    rooms.write("large", bytes(LARGE))
    only = json.dumps(["large"]).encode()
    number = rooms.begin("file.pack", {"only": only}, path="", credit=protocol.CHUNK_BYTES)
    assert rooms.event(number)[0]["event"] == "held"
    rooms.shell(change)
    rooms.send({"op": "credit", "target": number, "bytes": 2 * LARGE})
    said = [header["event"] for header, _ in rooms.events(number)]
    assert [each for each in said if each != "held"] == ["dropped", "data", "done"]


def is_one_moment(content: bytes) -> bool:
    """Whether it was so at some time, when it is filled page by page with one letter after another."""
    letters = [content[at] for at in range(0, len(content), 4096)]
    changes = [pair for pair in pairwise(letters) if pair[0] != pair[1]]
    return not changes or changes in ([(98, 97)], [(99, 98)], [(97, 99)])


@pytest.mark.parametrize("size", [16_384, LARGE], ids=["small", "large"])
def test_a_file_that_is_written_all_the_time_is_as_it_was_at_one_moment(
    rooms: Rooms, size: int
) -> None:
    code = (
        "import os\nfd = os.open('f', os.O_WRONLY)\nprint(flush=True)\nwhile True:\n"
        f" for c in b'abc':\n  for at in range(0, {size}, 4096): os.pwrite(fd, bytes([c]) * 4096, at)"
    )
    rooms.write("f", b"c" * size)
    pid = rooms.spawn("python3", "-c", code)
    assert rooms.event(rooms.begin("follow", pid=pid, credit=protocol.CREDIT))[1]["data"] == b"\n"
    for _ in range(40):
        content = rooms.chosen("f").get("f", b"")
        assert isinstance(content, bytes)
        assert is_one_moment(content)
    rooms.call("signal", pid=pid, signal="SIGKILL")
    rooms.shell("sleep 0.05")
    assert len(rooms.chosen("f")["f"] or b"") == size


CHOICES = {
    "nothing": b"[]",
    "no list": b'"f"',
    "no JSON": b"f",
    "no text": b"\xff",
    "no path": b"[7]",
    "above": b'["../f"]',
    "absolute": b'["/etc/passwd"]',
    "the workspace": b'[""]',
    "nested": b"[" * 100_000,
    "too many": json.dumps(["f"] * (protocol.MOST_CHOSEN + 1)).encode(),
    "too long": b'["' + b"x" * protocol.CHOSEN_BYTES + b'"]',
}


@pytest.mark.parametrize("only", CHOICES.values(), ids=CHOICES)
def test_what_is_no_list_of_paths_is_refused(rooms: Rooms, only: bytes) -> None:
    number = rooms.begin("file.pack", {"only": only}, path="", credit=protocol.CREDIT)
    with pytest.raises(Failed) as caught:
        rooms.event(number)
    assert (caught.value.code, caught.value.field) == ("refused", "only")


def test_single_files_go_through_in_constant_memory(open_rooms: Callable[..., Rooms]) -> None:
    rooms = open_rooms()
    rooms.shell("head -c 60000000 /dev/zero >large; sleep 0.05")
    number = rooms.begin("file.pack", {"only": b'["large"]'}, path="", credit=protocol.CREDIT)
    size = sum(len(parts.get("data", b"")) for _, parts in rooms.events(number))
    assert size > 60_000_000
    peak = rooms.shell(f"grep VmHWM /proc/1/status /proc/{worker(rooms)}/status").split()
    assert max(int(word) for word in peak if word.isdigit()) < 40_000
