"""A kept sandbox of a remote service: what interrupts, deadlines and lost machines do to it."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.e2b.provider import E2BProvider
from providers.errors import (
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
)
from providers.sandbox import KeptSandbox
from providers.values import Command, Event, InputFile, Job, SandboxSpec
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import followed, open_e2b
from tests.support.sandboxes import long_enough
from tests.support.wire_server import eventually

KEPT = SandboxSpec(kept=True)
NOTE = "cofferdam-context"


@pytest.fixture
def kept(e2b: E2BProvider) -> Iterator[KeptSandbox]:
    sandbox = e2b.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    yield sandbox
    sandbox.close()


def begin(sandbox: KeptSandbox, code: str, run: str = "") -> tuple[threading.Thread, list[object]]:
    """Run a cell in a thread, up to its first output."""
    begun = threading.Event()
    results: list[object] = []
    thread = threading.Thread(
        target=lambda: results.append(sandbox.run(Job(code, run=run), lambda event: begun.set()))
    )
    thread.start()
    assert begun.wait(60)
    return thread, results


def test_an_interrupt_stops_the_cell_and_keeps_the_state(kept: KeptSandbox) -> None:
    kept.run(Job("kept = 41"))
    thread, results = begin(kept, "print('begun', flush=True)\nwhile True: pass")
    assert kept.interrupt() is True
    thread.join(60)
    (result,) = results
    assert (result.exit_code, result.timed_out) == (130, False)  # type: ignore[attr-defined]
    assert result.metadata["context_kept"] is True  # type: ignore[attr-defined]
    assert kept.run(Job("print(kept + 1)")).stdout == "42\n"
    assert kept.interrupt() is False


def test_an_interrupt_that_names_another_run_leaves_this_one(kept: KeptSandbox) -> None:
    kept.run(Job("kept = 41", run="first"))
    thread, results = begin(kept, "print('begun', flush=True)\nwhile True: pass", run="second")
    assert kept.interrupt(run="first") is False
    assert kept.interrupt(run="third") is False
    assert kept.interrupt(run="second") is True
    thread.join(60)
    assert results[0].exit_code == 130  # type: ignore[attr-defined]
    with pytest.raises(ProviderUnavailable, match="before it began"):
        kept.run(Job("kept = 0", run="third"))
    assert kept.run(Job("print(kept + 1)")).stdout == "42\n"


def test_a_cell_that_will_not_stop_loses_its_context_and_not_the_sandbox(
    kept: KeptSandbox,
) -> None:
    kept.files.write("file", [b"stays"])
    kept.run(Job("kept = 41"))
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('begun', flush=True)\nwhile True: pass"
    )
    result = kept.run(Job(code, timeout=1))
    assert (result.timed_out, result.metadata["context_kept"]) == (True, False)
    lost = kept.run(Job("print(kept)"))
    assert "NameError" in lost.stderr
    assert b"".join(kept.files.read("file")) == b"stays"


def test_a_deadline_keeps_the_state_of_a_cell_that_stops(kept: KeptSandbox) -> None:
    kept.run(Job("kept = 41"))
    result = long_enough(
        lambda seconds: kept.run(
            Job("print('begun', flush=True)\nwhile True: pass", timeout=seconds)
        ),
        lambda result: bool(result.stdout),
        1,
    )
    assert (result.timed_out, result.stdout) == (True, "begun\n")
    assert result.metadata["context_kept"] is True
    assert kept.run(Job("print(kept + 1)")).stdout == "42\n"


def test_runs_of_one_context_follow_one_another_and_others_go_on(kept: KeptSandbox) -> None:
    other = kept.contexts.create("python")
    code = (
        "import os, time\nprint('begun', flush=True)\n"
        "while not os.path.exists('seen'): time.sleep(0.01)"
    )
    thread, results = begin(kept, code)
    assert kept.run(Job("open('seen', 'w').close()", context=other.id)).exit_code == 0
    thread.join(60)
    assert results[0].exit_code == 0  # type: ignore[attr-defined]


def test_main_of_a_context_leaves_a_module_of_that_name_alone(kept: KeptSandbox) -> None:
    kept.run(Job("def main(n):\n    return n", files=[InputFile("main.py", b"mine = 7")]))
    assert kept.run(Job("", arguments={"n": [1, None]})).result == [1, None]
    assert kept.run(Job("import main as other\nprint(other.mine)")).stdout == "7\n"


def test_a_cell_with_arguments_calls_its_own_main_alone(kept: KeptSandbox) -> None:
    kept.run(Job("def main(n):\n    return ['earlier', n]"))
    with pytest.raises(InvalidConfiguration) as raised:
        kept.run(Job("x = 1", arguments={"n": 7}))
    assert raised.value.field == "arguments"
    assert kept.run(Job("if True:\n    def main(n): return n", arguments={"n": 7})).result == 7


def test_another_process_attaches_and_finds_contexts_and_files(
    kept: KeptSandbox, e2b_server: E2BServer
) -> None:
    named = kept.contexts.create("python")
    kept.run(Job("kept = 41"))
    kept.run(Job("other = 1", context=named.id))
    kept.files.write("a/b", [b"content"])
    provider = open_e2b(e2b_server)
    again = provider.attach(kept.ref)
    assert again.run(Job("print(kept + 1)")).stdout == "42\n"
    assert again.run(Job("print(other)", context=named.id)).stdout == "1\n"
    assert b"".join(again.files.read("a/b", 3)) == b"tent"
    provider.close()
    assert kept.run(Job("print(kept)")).stdout == "41\n"


def test_a_machine_that_has_gone_is_lost_and_says_so(
    kept: KeptSandbox, e2b: E2BProvider, e2b_server: E2BServer
) -> None:
    kept.run(Job("kept = 1"))
    e2b_server.fail("execute", "dead")
    with pytest.raises(KeptSandboxLost):
        kept.run(Job("print(1)"))
    with pytest.raises(KeptSandboxLost):
        e2b.attach(kept.ref)


def test_what_is_kept_is_not_swept_and_ends_by_itself(
    e2b: E2BProvider, e2b_server: E2BServer, kept: KeptSandbox
) -> None:
    (machine,) = e2b_server.sandboxes.values()
    assert machine.metadata["cofferdam"].startswith("cofferdam-kept-")
    assert machine.lifetime == 900
    assert e2b.sweep() == 0
    kept.renew(5000)
    assert 5000 <= machine.lifetime < 5100
    brief = e2b.open(SandboxSpec(kept=True, seconds=59.5), "wonderland")
    assert e2b_server.sandboxes[brief.ref.partition("/")[0]].lifetime == 60
    brief.close()


def test_environment_is_for_all_that_runs_or_for_one_job(e2b: E2BProvider) -> None:
    sandbox = e2b.open(SandboxSpec(kept=True, environment={"ALL": "1"}), "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    code = "import os\nprint(os.environ.get('ALL'), os.environ.get('ONE'))"
    assert sandbox.run(Job(code, environment={"ONE": "2"})).stdout == "1 2\n"
    assert sandbox.run(Job(code)).stdout == "1 None\n"
    process = sandbox.processes.start(Command(shell="echo $ALL $ONE", environment={"ONE": "3"}))
    assert followed(sandbox, process.pid) == b"1 3\n"
    sandbox.close()


def test_output_of_a_command_is_kept_for_who_follows_later(kept: KeptSandbox) -> None:
    process = kept.processes.start(Command(argv=["printf", "%s", "0123456789"]))
    assert followed(kept, process.pid) == b"0123456789"
    assert followed(kept, process.pid, 7) == b"789"


def test_a_command_ends_at_its_deadline(kept: KeptSandbox) -> None:
    process = kept.processes.start(Command(argv=["sleep", "60"], timeout=1))
    ended = kept.processes.follow(process.pid, lambda event: None)
    assert (ended.exit_code, ended.ended_by_us) == (137, "timeout")


def test_a_terminal_has_the_size_that_it_is_given(kept: KeptSandbox) -> None:
    process = kept.processes.start(Command(shell="stty size; read x; stty size", pty=(80, 24)))
    kept.processes.resize(process.pid, 100, 30)
    kept.processes.write(process.pid, b"\n")
    assert b"30 100" in followed(kept, process.pid)


def test_a_command_that_somebody_else_has_started_is_followed_and_ended(
    kept: KeptSandbox, e2b_server: E2BServer
) -> None:
    process = kept.processes.start(Command(shell="read line; echo got $line", stdin=True))
    provider = open_e2b(e2b_server)
    again = provider.attach(kept.ref)
    assert [one.pid for one in again.processes.list()] == [process.pid]
    seen: list[Event] = []
    thread = threading.Thread(target=again.processes.follow, args=(process.pid, seen.append))
    thread.start()
    assert eventually(lambda: e2b_server.requests.count("Connect") == 1)
    again.processes.write(process.pid, b"it\n")
    thread.join(60)
    assert b"".join(event.data for event in seen) == b"got it\n"
    with pytest.raises(InvalidConfiguration, match="pid: "):
        open_e2b(e2b_server).attach(kept.ref).processes.follow(process.pid, seen.append)


def test_a_file_that_changes_while_it_is_archived_is_left_out_and_a_link_is_one(
    kept: KeptSandbox, e2b_server: E2BServer
) -> None:
    large = bytes(range(256)) * 8192
    kept.files.write("d/large", [large])
    kept.files.write("d/growing", [large])
    kept.run(Job("import os; os.symlink('large', 'd/link')"))
    (machine,) = e2b_server.sandboxes.values()
    growing = machine.notebook.home / "d" / "growing"

    def grow(operation: str) -> None:
        if operation == "read":
            with growing.open("ab") as file:
                file.write(b"x")

    e2b_server.fault = grow
    packed = b"".join(kept.files.read_archive("d", ["growing", "large", "link", "gone"]))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["large", "link"]
        content = archive.extractfile("large")
        assert content is not None
        assert content.read() == large
        assert archive.getmember("link").linkname == "large"


def test_what_changes_in_a_folder_is_told(kept: KeptSandbox) -> None:
    kept.files.make_directory("watched")
    changes = kept.files.watch("watched")
    told: list[object] = []
    thread = threading.Thread(
        target=lambda: told.append(next(change for change in changes if change)), daemon=True
    )
    thread.start()
    number = 0

    def changed() -> bool:
        nonlocal number
        number += 1
        kept.files.write(f"watched/file-{number}", [b"x"])
        return bool(told)

    assert eventually(changed, 60)
    thread.join(60)
    changes.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["500", "cut", "429"])
def test_a_file_that_is_written_in_part_is_not_seen(
    kept: KeptSandbox, e2b_server: E2BServer, fault: str
) -> None:
    kept.files.write("file", [b"former"])
    e2b_server.fail("Move", fault)
    with pytest.raises(SandboxError):
        kept.files.write("file", [b"the new one"])
    assert b"".join(kept.files.read("file")) == b"former"
    assert [entry.path for entry in kept.files.list()] == ["file"]


@pytest.mark.parametrize("fault", ["cut", "500", "dead", "bad_json", "truncated"])
def test_a_cell_that_fails_with_its_machine_may_have_run(
    kept: KeptSandbox, e2b_server: E2BServer, fault: str
) -> None:
    kept.run(Job("kept = 1"))
    e2b_server.fail("execute", fault)
    with pytest.raises(SandboxError) as caught:
        kept.run(Job("print(1)"))
    assert caught.value.started


def test_the_next_run_says_that_one_which_was_given_up_has_lost_the_context(
    aliyun: AliyunCodeInterpreterProvider, aliyun_server: AgentRunServer
) -> None:
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    sandbox.files.make_directory("below")
    named = sandbox.contexts.create("python", "below", "mine").id
    assert named == "mine"
    for context in ("default", named):
        sandbox.run(Job("kept = 41", context=context))
        executed = aliyun_server.requests.count("execute")
        forever = Job("while True: pass", timeout=20, context=context, run=f"in {context}")
        thread = threading.Thread(target=sandbox.run, args=(forever,))
        thread.start()
        assert eventually(lambda: aliyun_server.requests.count("execute") > executed)  # noqa: B023
        # Nobody waits for it any more.
        assert sandbox.interrupt(context, f"in {context}") is True
        thread.join(60)
    for context, folder in (("default", "user"), (named, "below")):
        # Whoever runs next in it is told, once.
        again = aliyun.attach(sandbox.ref)
        seen = "import os; print(os.path.basename(os.getcwd()), 'kept' in globals())"
        lost = again.run(Job(seen, context=context))
        assert (lost.stdout, lost.metadata["context_kept"]) == (f"{folder} False\n", False)
        assert sandbox.run(Job("1", context=context)).metadata["context_kept"] is True
    sandbox.close()


def test_a_note_that_code_has_made_long_is_none_and_its_context_is_lost(
    kept: KeptSandbox,
) -> None:
    kept.run(Job("open('/tmp/.cofferdam-context', 'w').write('{' + ' ' * 10_000_000 + '}')"))
    lost = kept.run(Job("print(1)"))
    assert (lost.stdout, lost.metadata["context_kept"]) == ("1\n", False)
    assert kept.run(Job("print(1)")).metadata["context_kept"] is True


def test_a_note_that_code_has_written_reaches_no_other_sandbox(
    aliyun: AliyunCodeInterpreterProvider, aliyun_server: AgentRunServer
) -> None:
    attacker, victim = aliyun.open(KEPT, "wonderland"), aliyun.open(KEPT, "underland")
    assert isinstance(attacker, KeptSandbox)
    assert isinstance(victim, KeptSandbox)
    machine, _, _ = victim.ref.rpartition("/")
    attacker.run(Job("1"))
    notes = [
        json.dumps({"default": {"id": f"x/../../../{machine}", "language": "python", "cwd": ""}}),
        f"x/../../../{machine}",
        "[" * 100_000,
        json.dumps({"default": {"id": 7}, "x" * 1000: {}, "mine": None}),
    ]
    for note in notes:
        (aliyun_server.sandboxes[attacker.ref.rpartition("/")[0]].tmp / NOTE).write_text(note)
        attacker.contexts.restart("default")
        attacker.contexts.list()
        with pytest.raises(InvalidConfiguration, match="There is no"):
            attacker.run(Job("1", context=f"x/../../../{machine}"))
    assert machine in aliyun_server.sandboxes
    assert victim.run(Job("print(1)")).stdout == "1\n"
    attacker.close()
    victim.close()
