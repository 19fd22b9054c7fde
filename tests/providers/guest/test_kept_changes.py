"""What has changed in a kept sandbox's workspace is told, whatever the kernel did not notice."""

from __future__ import annotations

import pytest

from providers.runtime.guest import file_changes, protocol
from tests.providers.guest.files_worker import worker
from tests.providers.guest.kept_changes import THOROUGH, settled
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]
pytestmark = pytest.mark.usefixtures("emptied")


def kill_worker(rooms: Rooms) -> None:
    """End the process that works on files, and wait until that was seen."""
    watching = rooms.begin("file.watch", path="", credit=protocol.CREDIT)
    assert rooms.event(watching)[0]["event"] == "ready"
    rooms.shell(f"kill -9 {worker(rooms)}")
    with pytest.raises(Failed, match="ended"):
        while True:
            rooms.event(watching)


# What it is for.


@THOROUGH
def test_what_is_new_changed_or_gone_is_told_and_nothing_else(rooms: Rooms, thorough: bool) -> None:
    rooms.shell("mkdir -p a/b c; echo 1 >a/one; echo 2 >a/b/two; echo 3 >three; ln -s three link")
    began = rooms.changes()
    assert began.complete
    assert set(began.entries) == {"a", "a/b", "c", "a/one", "a/b/two", "three", "link"}
    assert began.entries["link"]["target"] == "three"
    mark = settled(rooms)
    assert rooms.changes(mark, thorough=thorough).names == set()
    rooms.shell("echo more >>a/b/two; rm three; mkdir d; echo 4 >d/four; chmod 700 c")
    told = rooms.changes(mark, thorough=thorough)
    assert told.names == {"a/b/two", "-three", "d", "d/four", "c"}
    assert (told.complete, told.entries["a/b/two"]["size"]) == (False, 7)
    assert (told.entries["c"]["type"], told.entries["c"]["mode"]) == ("directory", 0o700)
    assert told.entries["d/four"] == rooms.call("file.stat", path="d/four")["entry"]


@THOROUGH
def test_readers_with_different_marks_are_told_what_each_has_missed(
    rooms: Rooms, thorough: bool
) -> None:
    marks = [settled(rooms)]
    for name in ("one", "two", "three"):
        rooms.shell(f"sleep 0.05; echo {name} >{name}")
        marks.append(rooms.changes(marks[-1], thorough=thorough).mark)
    rooms.shell("sleep 0.05; rm one")
    assert rooms.changes(marks[3], thorough=thorough).names >= {"-one"}
    assert rooms.changes(marks[1], thorough=thorough).names >= {"-one", "two", "three"}
    assert rooms.changes(marks[0], thorough=thorough).names >= {"-one", "two", "three"}
    assert rooms.changes("", thorough=thorough).names == {"two", "three"}


@THOROUGH
def test_what_moves_is_gone_and_new_with_all_that_is_in_it(rooms: Rooms, thorough: bool) -> None:
    rooms.shell("mkdir -p d/in; echo 1 >d/in/f; echo 2 >g")
    mark = settled(rooms)
    rooms.shell("mv d e; mv g e/in/h")
    names = {"-d", "-d/in", "-d/in/f", "-g", "e", "e/in", "e/in/f", "e/in/h"}
    assert rooms.changes(mark, thorough=thorough).names == names
    rooms.shell("echo more >e/in/f")
    assert rooms.changes(mark, thorough=thorough).names == names


@THOROUGH
def test_a_path_that_is_another_kind_of_thing_is_told(rooms: Rooms, thorough: bool) -> None:
    rooms.shell("mkdir d; touch d/f f")
    mark = settled(rooms)
    rooms.shell("rm -r d; echo now a file >d; rm f; mkdir f; touch f/x; mkfifo p")
    told = rooms.changes(mark, thorough=thorough)
    assert told.names == {"d", "-d/f", "f", "f/x", "p"}
    assert [told.entries[name]["type"] for name in "dfp"] == ["file", "directory", "other"]


@THOROUGH
def test_what_is_written_through_the_files_room_is_told_without_what_it_needs_for_that(
    rooms: Rooms, thorough: bool
) -> None:
    rooms.write("d/f", b"x")
    mark = settled(rooms)
    number = rooms.begin("file.write", path="d/f")
    rooms.send({"op": "data", "target": number}, [("data", b"half")])
    assert rooms.event(number)[0]["event"] == "taken"
    assert rooms.changes(mark, thorough=thorough).names == set()
    rooms.send({"op": "end", "target": number})
    assert rooms.event(number)[0]["event"] == "done"
    assert rooms.changes(mark, thorough=thorough).names == {"d/f"}
    assert rooms.call("file.remove", path="d")["found"] is True
    assert rooms.changes(mark, thorough=thorough).names == {"-d", "-d/f"}


def test_a_folder_that_comes_with_its_content_is_watched_from_then_on(rooms: Rooms) -> None:
    mark = settled(rooms)
    rooms.shell("mkdir -p new/er/est; touch new/er/est/f")
    told = rooms.changes(mark)
    assert told.names == {"new", "new/er", "new/er/est", "new/er/est/f"}
    rooms.shell("echo x >new/er/est/f; mkdir new/er/d; touch new/er/d/g")
    assert rooms.changes(told.mark).names == {"new/er/est/f", "new/er/d", "new/er/d/g"}


# Without the kernel's word, and with less of it than there was.


@THOROUGH
def test_all_is_told_after_the_process_that_remembers_was_killed(
    rooms: Rooms, thorough: bool
) -> None:
    rooms.write("f", b"x")
    mark = rooms.changes().mark
    kill_worker(rooms)
    rooms.write("g", b"y")
    told = rooms.changes(mark, thorough=thorough)
    assert told.complete
    assert told.names == {"f", "g"}
    rooms.shell("echo more >>g")
    assert "g" in rooms.changes(told.mark, thorough=thorough).names


@pytest.mark.parametrize(
    "mark", ["x", "0:0", "7", ":", "é:1", "0" * 100, "{epoch}:99", "{epoch}:-1"]
)
def test_whoever_has_a_mark_that_was_not_given_out_is_told_all(rooms: Rooms, mark: str) -> None:
    rooms.write("f", b"x")
    given = rooms.changes().mark
    told = rooms.changes(mark.replace("{epoch}", given.partition(":")[0]))
    assert (told.complete, told.names) == (True, {"f"})


@pytest.mark.parametrize(
    ("field", "value"),
    [("mark", 7), ("mark", None), ("mark", "x" * 101), ("thorough", "yes"), ("thorough", 1)],
)
def test_what_is_no_mark_is_refused(rooms: Rooms, field: str, value: object) -> None:
    with pytest.raises(Failed) as caught:
        rooms.event(rooms.begin("file.changes", credit=1000, **{field: value}))
    assert (caught.value.code, caught.value.field) == ("refused", field)


def test_more_notices_than_the_kernel_keeps_lose_nothing(rooms: Rooms) -> None:
    rooms.shell("mkdir d; seq 200 | sed s:^:d/: | xargs touch; touch last")
    mark = settled(rooms)
    code = "import os\nfor i in range(30000): os.utime(f'd/{i % 200 + 1}')\nopen('last', 'w').write('x')"
    rooms.follow(rooms.spawn("python3", "-c", code))
    told = rooms.changes(mark)
    assert told.names == {"last", *(f"d/{n}" for n in range(1, 201))}


def test_more_folders_than_are_watched_lose_nothing(rooms: Rooms) -> None:
    count = file_changes.MOST_WATCHED + 100
    rooms.shell(f"mkdir many; cd many; seq {count} | xargs mkdir")
    mark = settled(rooms)
    rooms.shell("touch many/1/f many/2000/f; echo x >f")
    told = rooms.changes(mark)
    assert told.names == {"many/1/f", "many/2000/f", "f"}
    rooms.call("file.remove", path="many")
    told = rooms.changes(told.mark)
    assert {"-many", "-many/1/f", f"-many/{count}"} <= told.names
    rooms.shell("echo y >f")
    assert rooms.changes(told.mark).names == {"f"}


def test_more_that_is_gone_than_is_remembered_is_told_by_telling_all(rooms: Rooms) -> None:
    mark = settled(rooms)
    rooms.shell("mkdir many; echo x >f")
    for first in (10_000, 20_000, 30_000):
        rooms.shell(f"cd many; seq {first} {first + 7000} | xargs touch")
        rooms.changes()
        rooms.shell("cd many; ls | xargs rm")
        latest = rooms.changes()
    told = rooms.changes(mark)
    assert (told.complete, told.names) == (True, {"many", "f"})
    rooms.shell("echo y >f")
    assert rooms.changes(latest.mark).names == {"f"}
