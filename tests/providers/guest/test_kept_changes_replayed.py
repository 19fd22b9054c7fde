"""Whoever replays what has changed has what is there, whatever was done and by whom."""

from __future__ import annotations

import shlex

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.providers.guest.kept_changes import listed, replay
from tests.support.kept_frames import Failed, Rooms

pytest_plugins = ["tests.providers.guest.room_fixtures"]

NAMES = ["a", "b", "a/b", "a/b/c", "b/a", "a/\n", "\udcff"]
names = st.sampled_from(NAMES)
# What a program does, and what is done through the sandbox's interface.
by_a_program = st.one_of(
    st.builds("echo {1} >>{0}".format, names.map(shlex.quote), st.integers(0, 99)),
    st.builds("printf %0{1}d 0 >{0}".format, names.map(shlex.quote), st.integers(1, 2)),
    st.builds(
        "{0} {1}".format,
        st.sampled_from(["mkdir -p", "rm -rf", "rmdir"]),
        names.map(shlex.quote),
    ),
    st.builds("chmod {0} {1}".format, st.sampled_from(["700", "711"]), names.map(shlex.quote)),
    st.builds(
        "{0} {1} {2}".format,
        st.sampled_from(["mv -T", "ln", "ln -s", "cp -rT"]),
        names.map(shlex.quote),
        names.map(shlex.quote),
    ),
)
by_the_interface = st.one_of(
    st.tuples(st.sampled_from(["file.mkdir", "file.remove"]), names),
    st.tuples(st.just("file.write"), names),
    st.tuples(st.just("file.move"), names, names),
)
# A reader looks, by its number, and thoroughly or not.
looks = st.tuples(st.integers(0, 2), st.booleans())
steps = st.lists(st.one_of(by_a_program, by_the_interface, looks), max_size=12)


def carry_out(rooms: Rooms, op: str, path: str, target: str = "") -> None:
    try:
        if op == "file.write":
            rooms.write(path, b"written")
        else:
            rooms.call(op, path=path, **({"target": target} if target else {}))
    except Failed:
        # Something else is there, or nothing.
        return


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_the_changes_replayed_are_the_listing(
    rooms: Rooms, steps: list[str | tuple[object, ...]]
) -> None:
    readers: list[tuple[str, dict[str, tuple[object, ...]]]] = [("", {}) for _ in range(3)]

    def look(number: int, *, thorough: bool) -> None:
        mark, model = readers[number]
        told = rooms.changes(mark, thorough=thorough)
        replay(model, told.entries, told.removed, complete=told.complete)
        readers[number] = (told.mark, model)
        assert model == listed(rooms)

    for entry in rooms.list():
        rooms.call("file.remove", path=entry["path"])
    look(0, thorough=False)
    for step in steps:
        if isinstance(step, str):
            rooms.follow(rooms.spawn(shell=step))
        elif isinstance(step[0], int):
            look(step[0], thorough=bool(step[1]))
        else:
            carry_out(rooms, *map(str, step))
    for number in range(3):
        look(number, thorough=False)
        look(number, thorough=True)
