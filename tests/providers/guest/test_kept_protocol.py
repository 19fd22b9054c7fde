"""What a kept guest answers to whom, and that it ends with whoever does not keep to the protocol."""

from __future__ import annotations

from typing import Any

import pytest

from providers.runtime.guest import wire
from providers.runtime.guest.protocol import EVENT_COST, MOST_CONTEXTS
from tests.support.kept_guest import Guests, KeptGuest


def contexts(answer: Any) -> list[str]:
    return [each["id"] for each in answer.header["contexts"]]


def test_a_sandbox_that_is_kept_has_a_context_at_once(guests: Guests) -> None:
    kept = guests.warm("bash").keep()

    assert kept.header["contexts"] == [{"id": "default", "language": "bash", "cwd": ""}]


def test_contexts_have_names_of_their_own(kept: KeptGuest) -> None:
    made = kept.ask("context.create", language="python", context="other", cwd="data")
    numbered = kept.ask("context.create", language="bash")

    assert made.header["context"] == {"id": "other", "language": "python", "cwd": "data"}
    kept.run("x = 'default'")
    kept.run("x = 'other'", context="other")
    assert kept.run("x").shown == ["'default'"]
    assert kept.run("import os; x, os.getcwd()", context="other").shown == [
        "('other', '/workspace/data')"
    ]
    assert kept.run("pwd", context=numbered.header["context"]["id"]).stdout == "/workspace\n"
    assert contexts(kept.ask("context.list")) == ["default", "other", "bash-1"]


def test_contexts_end_and_start_anew(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="other")
    kept.run("x = 1", context="other")

    assert kept.ask("context.restart", context="other").header["context"]["id"] == "other"
    assert "NameError" in kept.run("x", context="other").stderr
    assert kept.ask("context.destroy", context="other").header["found"] is True
    assert kept.ask("context.destroy", context="other").header["found"] is False
    missing = kept.run("x", context="other")
    assert (missing.failed, missing.header["code"], missing.header["field"]) == (
        True,
        "missing",
        "context",
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"language": "cobol"}, "language"),
        ({"language": "python", "context": "default"}, "context"),
        ({"language": "python", "context": "a\nb"}, "context"),
        ({"language": "python", "cwd": "a\0b"}, "cwd"),
        ({"language": "python", "cwd": "é" * 128}, "cwd"),
        ({"language": "python", "cwd": "a/" * 2048 + "b"}, "cwd"),
    ],
)
def test_a_context_that_cannot_be_is_refused(kept: KeptGuest, fields: Any, field: str) -> None:
    refused = kept.ask("context.create", **fields)

    assert (refused.failed, refused.header["field"]) == (True, field)


def test_a_context_whose_interpreter_does_not_start_is_not_there(kept: KeptGuest) -> None:
    kept.run("open('file', 'w').close()")
    for language in ("python", "bash"):
        refused = kept.ask("context.create", language=language, context="new", cwd="file/below")
        assert (refused.failed, refused.header["code"]) == (True, "refused")
        assert "Not a directory" in refused.header["reason"]

    assert contexts(kept.ask("context.list")) == ["default"]


def test_contexts_are_bounded(guests: Guests) -> None:
    kept = guests.kept(processes=200, memory_bytes=2**30)
    made = [kept.begin("context.create", language="bash") for _ in range(MOST_CONTEXTS)]

    answers = [kept.wait(number) for number in made]
    assert [answer.failed for answer in answers] == [*[False] * (MOST_CONTEXTS - 1), True]
    assert answers[-1].header["code"] == "exhausted"


def test_runs_of_different_contexts_go_side_by_side(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="other")
    slow = kept.begin_run("import time; time.sleep(60)")

    assert kept.run("1", context="other").shown == ["1"]
    busy = kept.run("1")
    assert (busy.failed, busy.header["field"]) == (True, "context")
    kept.ask("interrupt", target="default")
    assert kept.wait(slow).exit_code == 130


def test_a_reset_ends_every_process_and_keeps_the_files(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="other")
    kept.run(
        "import subprocess\nopen('file', 'w').write('kept')\nx = 1\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\nNone"
    )
    running = kept.begin_run("import time; time.sleep(60)", context="other")

    assert contexts(kept.ask("reset")) == ["default"]
    assert (kept.wait(running).exit_code, "x") == (137, "x")
    after = kept.run(
        """
        import os
        names = [open(f'/proc/{pid}/comm').read() for pid in os.listdir('/proc') if pid.isdigit()]
        open('file').read(), 'x' in globals(), 'sleep\\n' in names
        """
    )
    assert after.shown == ["('kept', False, False)"]


def test_without_credit_a_run_waits_with_its_answer_and_others_do_not(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="other")
    poor = kept.begin_run("print('x' * 100_000)", credit=EVENT_COST + 1)

    assert kept.run("'others'", context="other").shown == ["'others'"]
    while (after := kept.run("'the same context'")).failed:
        continue
    assert after.shown == ["'the same context'"]
    assert not kept.is_over(poor)
    sent = sum(len(parts["data"]) for _, parts in kept.events(poor))
    assert sent <= 64 * 1024
    kept.send({"op": "credit", "target": poor, "bytes": 1_000_000})
    ended = kept.wait(poor)
    assert b"".join(parts["data"] for _, parts in ended.events) == b"x" * 100_000 + b"\n"
    assert len(ended.stdout) == 100_001


def test_a_run_without_credit_sends_no_events(kept: KeptGuest) -> None:
    ran = kept.run("print('quiet')\n1", credit=None)

    assert (ran.events, ran.stdout, ran.shown) == ([], "quiet\n", ["1"])


def test_unknown_operations_are_refused_and_late_credit_is_nothing(kept: KeptGuest) -> None:
    assert kept.ask("format").header["field"] == "op"
    kept.send({"op": "credit", "target": 12345, "bytes": 1})
    kept.send({"op": "stop", "target": 12345})
    assert kept.run("1").shown == ["1"]


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        wire.pack({"op": "run"}, []),
        wire.pack({"id": "1", "op": "run"}, []),
        wire.pack({"id": 1}, []),
        wire.pack({"op": "credit", "bytes": 1}, []),
        wire.pack({"id": 1, "op": "run", "limits": {}}, []),
        wire.pack({"id": 1, "op": "context.list", "credit": "much"}, []),
        wire.pack({"op": "close"}, []),
    ],
)
def test_a_host_that_does_not_keep_to_it_or_closes_ends_the_guest(
    guests: Guests, frame: bytes
) -> None:
    kept = guests.kept()
    kept.run("import subprocess; subprocess.Popen(['sleep', '1000']); None")
    kept.send_raw(frame)

    assert kept.ended()


def test_the_end_of_the_channel_ends_the_guest(guests: Guests) -> None:
    kept = guests.kept()
    pidfds = guests.first_processes()

    kept.hang_up()

    assert guests.all_end(pidfds)


def test_a_single_run_imports_nothing_of_this(guests: Guests) -> None:
    guest = guests.warm()
    code = b"import sys; print([name for name in sys.modules if name.startswith('_cofferdam')])"
    limits = {"memory_bytes": 2**28, **guest.limits}
    header = {"id": 1, "entrypoint": "script", "timeout": 60, "limits": limits}
    guest.send(header, ("code", code))

    _, parts = guest.next()
    loaded = parts["stdout"].decode()
    assert "_cofferdam.python_runner" in loaded
    assert not any(
        name in loaded
        for name in ("kept", "keeping", "context", "cell", "trees", "texts", "stream", "protocol")
    )
