"""Under gVisor, whose kernel differs and whose supervisor is root, contexts do what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kept_guest import Guests, KeptGuest


@pytest.fixture(scope="module")
def kept(_gvisor_guests: Guests) -> Iterator[KeptGuest]:
    """One for all of them: it takes a second to start."""
    yield _gvisor_guests.kept()
    _gvisor_guests.end_all()


def test_cells_keep_their_state(kept: KeptGuest) -> None:
    kept.run("x = 1\n1 / 0")

    assert kept.run("x + 1").shown == ["2"]
    assert kept.run("print(open('in').read())", ("file:in", b"given")).stdout == "given\n"
    made = kept.run("open('artifacts/a', 'w').write('1')\nNone")
    assert (made.artifacts, kept.run("None").artifacts) == ({"a": b"1"}, {})


@pytest.mark.parametrize(
    ("language", "first", "second", "shown"),
    [
        ("bash", "x=1; exit 3", "echo $x", "1\n"),
        ("nodejs", "const x = 1; process.exit(3)", "console.log(x)", "1\n"),
    ],
)
def test_other_languages_keep_theirs(
    kept: KeptGuest, language: str, first: str, second: str, shown: str
) -> None:
    assert not kept.ask("context.create", language=language, context=language).failed

    assert kept.run(first, context=language).exit_code == 3
    assert kept.run(second, context=language).stdout == shown


def test_a_deadline_keeps_the_state_of_what_stops_and_loses_that_of_what_does_not(
    kept: KeptGuest,
) -> None:
    stopped = kept.run_late("x = 1", "import time\ntime.sleep(60)", 0.5)
    assert (stopped.header["timed_out"], stopped.context_kept) == (True, True)
    assert kept.run("x").shown == ["1"]

    lost = kept.run(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)", timeout=0.5
    )
    assert (lost.header["timed_out"], lost.context_kept) == (True, False)
    assert "NameError" in kept.run("x").stderr


def test_a_reset_ends_what_was_left_behind(kept: KeptGuest) -> None:
    kept.run("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); None")
    kept.ask("reset")

    left = kept.run(
        "import os\n[p for p in os.listdir('/proc') if p.isdigit() and 'sleep' in open(f'/proc/{p}/comm').read()]"
    )
    assert left.shown == ["[]"]
