"""A guest whose host was cut off listens to the next one, and to nobody else."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from providers.runtime.guest import wire
from providers.runtime.guest.protocol import CREDIT, MOST_OPERATIONS
from providers.runtime.launchers.container_guest import After
from tests.support.kept_guest import Cell, Guests, KeptGuest

MARKER = secrets.token_bytes(32)
STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('on', flush=True)
time.sleep(120)
"""


def keep_lasting(guests: Guests, seconds: float = 60) -> KeptGuest:
    guest = guests.warm()
    assert not guest.keep(lasting={"marker": MARKER.hex(), "seconds": seconds}).failed
    return guest


def say_resume(kept: KeptGuest, seconds: float = 60) -> tuple[int, bytes]:
    echo = secrets.token_bytes(32)
    return kept.begin("resume", echo=echo.hex(), seconds=seconds), echo


def resume(kept: KeptGuest, *, marker: bytes = MARKER) -> Cell:
    """As another host does: what was said before means nothing."""
    kept.send_raw(marker)
    number, echo = say_resume(kept)
    after = After(echo)
    data = b""
    while not after.is_found:
        received = kept._channel.recv(1 << 16)
        assert received, "the guest has ended"
        data = after.feed(received)
    kept._parser = wire.Parser(wire.REQUEST_LIMIT)
    kept._arrived = kept._parser.feed(data)
    return kept.wait(number)


def test_a_new_host_finds_contexts_and_processes_as_they_were(guests: Guests) -> None:
    kept = keep_lasting(guests)
    kept.run("x = 41")
    pid = kept.ask("spawn", shell="echo begun; sleep 100").header["pid"]

    contexts = resume(kept).header["contexts"]

    assert contexts == [{"id": "default", "language": "python", "cwd": ""}]
    assert kept.run("x + 1").shown == ["42"]
    assert [each["pid"] for each in kept.ask("process.list").header["processes"]] == [pid]
    follow = kept.begin("follow", pid=pid, after=0, credit=CREDIT)
    kept.read_until(lambda: bool(kept.events(follow)))
    assert kept.events(follow)[0][1]["data"] == b"begun\n"


FRAME = wire.pack({"op": "file.write", "id": 7, "path": "x"}, [("data", b"y" * 300)])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cut=st.integers(1, len(FRAME) - 1),
    sizes=st.lists(st.integers(1, 40), max_size=4),
)
def test_half_a_frame_is_dropped_wherever_it_was_cut(
    lasting: KeptGuest, cut: int, sizes: list[int]
) -> None:
    lasting.send_raw(FRAME[:cut])
    for size in sizes:
        # Nor does it matter in which pieces the marker comes.
        lasting.send_raw(MARKER[:size])
        lasting.send_raw(FRAME[:cut])
    for byte in range(31):
        lasting.send_raw(MARKER[byte : byte + 1])

    assert not resume(lasting, marker=MARKER[31:]).failed
    assert lasting.run("x").shown == ["1"]


@pytest.fixture
def lasting(guests: Guests) -> KeptGuest:
    kept = keep_lasting(guests)
    kept.run("x = 1")
    return kept


def test_half_an_answer_is_dropped(lasting: KeptGuest) -> None:
    number = lasting.begin_run("print('y' * 150_000)")
    lasting.read_until(lambda: bool(lasting.events(number)))
    # More than the channel holds is still to come, and a part of a frame has.
    for _ in range(60):
        lasting.begin("file.list", path="", depth=1, credit=CREDIT)

    assert not resume(lasting).failed
    assert lasting.run("x").shown == ["1"]


@pytest.mark.parametrize(
    "said",
    [
        wire.pack({"op": "resume", "id": 1, "echo": "00" * 32, "seconds": 60}, []),
        secrets.token_bytes(32) + wire.pack({"op": "resume", "id": 1, "echo": "00" * 32}, []),
        MARKER[:31] + b"\0" + wire.pack({"op": "resume", "id": 1, "echo": "00" * 32}, []),
        b"\xff" * 100,
    ],
    ids=["no marker", "a guess", "nearly", "no frame"],
)
def test_who_does_not_know_the_marker_is_not_answered(lasting: KeptGuest, said: bytes) -> None:
    lasting.send_raw(said)
    lasting.begin("context.list")

    assert not resume(lasting).failed
    assert lasting.run("x").shown == ["1"]


def test_a_run_is_stopped_and_its_answer_goes_to_nobody(lasting: KeptGuest) -> None:
    number = lasting.begin_run("print('on', flush=True)\nimport time\ntime.sleep(120)")
    lasting.read_until(lambda: bool(lasting.events(number)))

    assert not resume(lasting).failed
    # `read_until` knows of no operation but those of this host.
    lasting._frames.clear()
    assert lasting.run("x").shown == ["1"]


def test_a_run_that_will_not_stop_costs_its_context_and_nobody_waits(lasting: KeptGuest) -> None:
    number = lasting.begin_run(STUBBORN)
    lasting.read_until(lambda: bool(lasting.events(number)))

    assert not resume(lasting).failed
    assert "NameError" in lasting.run("x").stderr


def test_a_run_that_waits_for_the_former_hosts_credit_is_stopped(lasting: KeptGuest) -> None:
    number = lasting.begin_run("while True: print('y' * 1000)", limits={"output_bytes": 10_000_000})
    lasting.read_until(lambda: len(lasting.events(number)) > 3)

    assert not resume(lasting).failed
    assert lasting.run("x").shown == ["1"]


def test_what_was_under_way_leaves_nothing_behind(lasting: KeptGuest) -> None:
    for _ in range(3):
        pid = lasting.ask("spawn", argv=["sleep", "100"], stdin=True).header["pid"]
        for _ in range(MOST_OPERATIONS // 4):
            lasting.begin("file.write", path="half")
            lasting.begin("follow", pid=pid, after=0, credit=CREDIT)
        lasting.begin("stdin", ("data", b"x" * 1_000_000), pid=pid)
        assert not resume(lasting).failed
    lasting._frames.clear()

    assert not lasting.ask("file.stat", path="half").failed
    assert lasting.run("x").shown == ["1"]


def test_it_ends_when_no_host_says_that_it_may_live_on(guests: Guests) -> None:
    pidfds = guests.first_processes()
    assert not pidfds
    renewed = keep_lasting(guests, 2)
    renewed.send({"op": "lease", "seconds": 120})
    forgotten = keep_lasting(guests, 2)

    # Whatever else is said.
    forgotten.run("import os\nos.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')")
    assert forgotten.ended()
    assert renewed.run("1 + 1").shown == ["2"]


def test_one_that_is_not_told_a_marker_has_none(guests: Guests) -> None:
    kept = guests.kept()

    with contextlib.suppress(BrokenPipeError):
        kept.send_raw(MARKER)
        say_resume(kept)
    assert kept.ended()


@given(
    noise=st.binary(max_size=200),
    rest=st.binary(max_size=50),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_what_comes_after_an_echo_is_passed_on_and_nothing_before(
    noise: bytes, rest: bytes, cuts: Any
) -> None:
    echo = b"\x01\x02" * 16
    after = After(echo)
    whole = noise + echo + rest
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[start:end] for start, end in itertools.pairwise(edges)]

    assert b"".join(map(after.feed, pieces)) == rest
