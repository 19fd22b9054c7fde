"""What E2B's own tests ask of commands, watches, links and sandboxes that are killed."""

from __future__ import annotations

import threading
from contextlib import suppress

import httpx
import pytest
from e2b import (
    CommandExitException,
    FilesystemEventType,
    InvalidArgumentException,
    TimeoutException,
)
from e2b_code_interpreter import Sandbox

from providers.runtime.guest.commands import MOST_KERNEL_PID, Commands
from tests.support.e2b_door import opened
from tests.support.waiting import wait_until

KILLED = "sandbox was killed"


def test_a_command_has_the_number_that_it_sees_and_is_ended_by_it(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo $$; exec sleep 600", background=True)
    sandbox.commands.run(f"kill -9 {handle.pid}")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (137, f"{handle.pid}\n")


def test_whatever_a_program_kills_the_sandbox_goes_on() -> None:
    with opened() as sandbox:
        sandbox.files.write("before", "kept")
        # Elsewhere than in a namespace of its own it would be the machine's processes.
        shown = sandbox.commands.run(
            "ls -d /proc/[0-9]*; cat /proc/1/cmdline | tr '\\0' ' '"
        ).stdout
        assert len(shown.splitlines()) < 30, shown
        assert sandbox.commands.run("kill -9 1; echo here").stdout == "here\n"
        # gVisor ends the program that asks as well; Linux does not.
        with suppress(CommandExitException):
            sandbox.commands.run("kill -9 -1")
        # The process that works on files has ended as well: the first call may say so.
        with suppress(InvalidArgumentException):
            sandbox.files.exists("before")
        assert sandbox.files.read("before") == "kept"
        assert sandbox.commands.run("echo here").stdout == "here\n"


def test_a_number_that_was_given_out_is_not_given_out_again() -> None:
    commands = Commands.__new__(Commands)
    commands._used, commands._beyond = set(), MOST_KERNEL_PID
    numbers = [commands._number(each) for each in (7, 8, 7, 7)]
    assert numbers == [7, 8, MOST_KERNEL_PID + 1, MOST_KERNEL_PID + 2]


def test_a_file_that_is_written_is_created_written_and_changed_at_once(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("events/in")
    watch = sandbox.files.watch_dir("events", recursive=True, include_entry=True)
    sandbox.files.write("events/in/new", "12345")
    seen = watch.get_new_events()
    wait_until(lambda: len(seen) >= 3 or seen.extend(watch.get_new_events()), 60)
    assert [(each.name, each.type) for each in seen] == [
        ("in/new", FilesystemEventType.CREATE),
        ("in/new", FilesystemEventType.WRITE),
        ("in/new", FilesystemEventType.CHMOD),
    ]
    entries = [each.entry for each in seen if each.entry is not None]
    assert {(each.path, each.size) for each in entries} == {("/home/user/events/in/new", 5)}
    sandbox.commands.run("mv events/in/new events/other")
    seen = []
    wait_until(lambda: len(seen) >= 2 or seen.extend(watch.get_new_events()), 60)
    assert [(each.name, each.type) for each in seen] == [
        ("in/new", FilesystemEventType.RENAME),
        ("other", FilesystemEventType.CREATE),
    ]
    watch.stop()


def test_a_text_is_uploaded_without_a_file_name(sandbox: Sandbox) -> None:
    sent = {"file": (None, "a text, \u00e9")}
    answer = httpx.post(sandbox.upload_url("text"), files=sent)
    assert answer.json() == [{"path": "/home/user/text", "name": "text", "type": "file"}]
    assert sandbox.files.read("text") == "a text, \u00e9"
    binary = bytes(range(256))
    httpx.post(sandbox.upload_url("bytes"), files={"file": (None, binary)})
    assert bytes(sandbox.files.read("bytes", format="bytes")) == binary
    named = httpx.post(sandbox.upload_url(""), files={"file": ("\u00e9", b"x")})
    assert named.json()[0]["path"] == "/home/user/\u00e9"
    assert httpx.post(sandbox.upload_url(""), files=sent).status_code == 400
    assert httpx.post(sandbox.upload_url("none"), files={"other": (None, "x")}).status_code == 400
    large = httpx.post(sandbox.upload_url("large"), files={"file": (None, b"x" * 2_700_000)})
    assert (large.status_code, "file name" in large.text) == (413, True)


def test_a_link_says_why_it_opens_nothing(sandbox: Sandbox) -> None:
    late = {"code": 401, "message": "signature is already expired"}
    assert httpx.get(sandbox.download_url("f", use_signature_expiration=-5)).json() == late
    link = sandbox.upload_url("f", use_signature_expiration=-5)
    assert httpx.post(link, files={"file": (None, "x")}).json() == late
    wrong = sandbox.download_url("f").replace("v1_", "v1_A")
    assert httpx.get(wrong).json() == {"code": 401, "message": "invalid signature"}


def test_a_command_of_a_sandbox_that_is_killed_is_told_so() -> None:
    with opened() as sandbox:
        waiting = sandbox.commands.run("sleep 600", background=True)
        sandbox.kill()
        with pytest.raises(TimeoutException, match=KILLED):
            waiting.wait()


def test_a_cell_of_a_sandbox_that_is_killed_is_told_so() -> None:
    with opened() as sandbox:
        sandbox.files.make_dir("mine")
        begun = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                sandbox.run_code(
                    "print('begun')\nimport time; time.sleep(600)",
                    on_stdout=lambda _: begun.set(),
                )
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(60)
        sandbox.kill()
        thread.join(60)
        (error,) = errors
        assert isinstance(error, TimeoutException)
        assert KILLED in str(error)
