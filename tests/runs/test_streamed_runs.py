"""A single run that is asked to says what it puts out while it runs, and all of it at its end."""

from __future__ import annotations

import pytest

from tests.conftest import require
from tests.support.kept_guest import Frame, Guests, KeptGuest
from tests.support.waiting import wait_until


def begin(
    guest: KeptGuest, code: str, *, stream: bool = True, timeout: float = 20, **limits: int
) -> None:
    header = {
        "id": 7,
        "entrypoint": "repl",
        "timeout": timeout,
        "stream": stream,
        "limits": {"memory_bytes": 2**28, **guest.limits, **limits},
    }
    guest.send(header, ("code", code.encode()))


def frames(guest: KeptGuest) -> list[Frame]:
    """All up to the answer."""
    found = [guest.next()]
    while found[-1][0].get("type") != "result":
        found.append(guest.next())
    return found


def test_output_comes_while_the_program_runs(guests: Guests) -> None:
    guest = guests.warm()
    begin(
        guest,
        "import os, sys\nprint('first', flush=True)\nwhile not os.path.exists('artifacts/go'): os.sched_yield()",
    )
    header, parts = guest.next()

    assert header == {"id": 7, "seq": 0, "event": "stdout", "parts": [["data", 6]]}
    assert parts == {"data": b"first\n"}


def test_events_are_counted_in_order_and_the_answer_is_whole(guests: Guests) -> None:
    guest = guests.warm()
    begin(
        guest,
        "import os, time\nos.write(1, b'a'); time.sleep(0.1); os.write(2, b'b'); time.sleep(0.1)\ndisplay(5)\nos.write(1, b'c')\nNone",
    )
    *events, (header, parts) = frames(guest)

    assert [event["seq"] for event, _ in events] == [0, 1, 2, 3]
    assert [(event["event"], given.get("data")) for event, given in events[:2]] == [
        ("stdout", b"a"),
        ("stderr", b"b"),
    ]
    assert {event["event"] for event, _ in events[2:]} == {"output", "stdout"}
    assert (parts["stdout"], parts["stderr"]) == (b"ac", b"b")
    assert header["order"] == [[1, 1], [2, 1], [1, 1]]


def test_what_is_dropped_is_not_sent_either(guests: Guests) -> None:
    guest = guests.warm()
    begin(guest, "print('x' * 1_000_000)", output_bytes=100_000)
    *events, (header, parts) = frames(guest)

    assert b"".join(given["data"] for _, given in events) == parts["stdout"] == b"x" * 100_000
    assert header["stdout_truncated"] is True


def test_a_host_that_does_not_read_holds_up_no_deadline(guests: Guests) -> None:
    """The supervisor's own clock tells when the run was over, and it is far from when we read."""
    guest = guests.warm()
    begin(guest, "while True: print('x' * 10_000)", timeout=0.5, output_bytes=4_000_000)
    wait_until(guests.nothing_runs, seconds=60)
    *_, (header, _) = frames(guest)

    assert (header["timed_out"], header["exit_code"]) == (True, None)


@pytest.mark.parametrize("language", ["python", "bash"])
def test_without_it_there_is_the_answer_alone(guests: Guests, language: str) -> None:
    guest = guests.warm(language)
    begin(guest, "exit", stream=False)

    assert len(frames(guest)) == 1


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "print('text', end='')\nwhile True: pass"),
        ("nodejs", "process.stdout.write('text')\nwhile (true);"),
        ("bash", "printf text; sleep 600"),
    ],
)
def test_text_without_a_newline_comes_at_once(guests: Guests, language: str, code: str) -> None:
    if language == "nodejs":
        require("node")
    guest = guests.warm(language)
    header = {
        "id": 7,
        "entrypoint": "script",
        "timeout": 3,
        "stream": True,
        "limits": {"memory_bytes": 2**28, **guest.limits},
    }
    guest.send(header, ("code", code.encode()))
    (event, given), *_, (answer, parts) = frames(guest)

    assert (event["event"], given, answer["timed_out"]) == ("stdout", {"data": b"text"}, True)
    assert parts["stdout"] == b"text"
