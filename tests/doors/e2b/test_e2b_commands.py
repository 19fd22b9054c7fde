"""E2B's SDK runs commands: each is an execution with a receipt, whatever becomes of its client."""

from __future__ import annotations

import threading

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import PtySize
from e2b_code_interpreter import Sandbox

from tests.support.e2b_door import records
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until


def test_a_command_is_run_and_recorded(door: Site, sandbox: Sandbox) -> None:
    heard: list[str] = []
    script = "echo $OF_SANDBOX $OWN; pwd; cat /home/user/here/f; echo e >&2"
    sandbox.files.write("/home/user/here/f", "in the home\n")
    done = sandbox.commands.run(
        script, envs={"OWN": "2"}, cwd="/home/user/here", user="user", on_stdout=heard.append
    )
    assert (done.stdout, done.stderr) == ("1 2\n/home/user/here\nin the home\n", "e\n")
    assert "".join(heard) == done.stdout
    last = records(door)[0]
    found = ask(door.service, "GET", f"{EXECUTIONS}/{last['id']}", key=door.alice).json
    assert (found["status"], found["language"]) == ("succeeded", "bash")
    assert found["receipt"]["sequence"] > 0
    assert found["session"].replace("-", "") == sandbox.sandbox_id


def test_a_command_runs_in_any_folder_that_it_sees(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("pwd\necho x", cwd="/usr/bin").stdout == "/usr/bin\nx\n"
    assert sandbox.commands.run("pwd", cwd="/home/user").stdout == "/home/user\n"
    quoted = "/usr/bin'; echo through; '"
    with pytest.raises(InvalidArgumentException, match="No such file"):
        sandbox.commands.run("true", cwd=quoted)
    assert sandbox.commands.run("pwd", cwd="../../etc").stdout == "/etc\n"


def test_a_command_that_misses_a_module_is_advised_on_stderr(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("python3 -c 'import no_such_package'")
    *_, error, advice, network = failed.value.stderr.splitlines()
    assert error == "ModuleNotFoundError: No module named 'no_such_package'"
    assert advice.startswith("Advice: There is no module 'no_such_package'.")
    assert network.startswith("Advice: pip reaches no registry: ")


def test_failures_are_told_in_the_sdks_words(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo said; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "said\n")
    with pytest.raises(InvalidArgumentException, match="No such file"):
        sandbox.commands.run("true", cwd="/is/not/there")
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run("true", cwd="is/not/there")
    with pytest.raises(AuthenticationException, match="no user"):
        sandbox.commands.run("true", user="root")
    assert not sandbox.commands.kill(4711)


def test_a_command_ends_with_its_time_and_is_recorded_so(door: Site, sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 600", timeout=1)
    wait_until(lambda: records(door)[0]["status"] == "timed_out", 60)


def test_commands_in_the_background(sandbox: Sandbox) -> None:
    talking = sandbox.commands.run("read a; echo got $a; cat", background=True, stdin=True)
    assert talking.pid in {each.pid for each in sandbox.commands.list()}
    sandbox.commands.send_stdin(talking.pid, "abc\n")
    sandbox.commands.stream_input(talking.pid, ["de", "f"])
    sandbox.commands.close_stdin(talking.pid)
    assert talking.wait().stdout == "got abc\ndef"

    left = sandbox.commands.run("read a; echo late", background=True, stdin=True)
    left.disconnect()
    found = sandbox.commands.connect(left.pid)
    sandbox.commands.send_stdin(left.pid, "\n")
    assert found.wait().stdout == "late\n"

    killed = sandbox.commands.run("sleep 600", background=True)
    assert killed.kill()
    with pytest.raises(CommandExitException) as ended:
        killed.wait()
    assert ended.value.exit_code == 137
    assert not killed.kill()


def test_a_terminal_has_a_size_and_can_be_connected_to(sandbox: Sandbox) -> None:
    shown: list[bytes] = []
    terminal = sandbox.pty.create(PtySize(rows=20, cols=60))
    sandbox.pty.resize(terminal.pid, PtySize(rows=31, cols=91))
    terminal.disconnect()
    again = sandbox.pty.connect(terminal.pid)
    listener = threading.Thread(target=lambda: again.wait(on_pty=shown.append))
    listener.start()
    sandbox.pty.send_stdin(terminal.pid, b"stty size\nexit\n")
    listener.join(60)
    assert b"31 91" in b"".join(shown)


def test_git_of_the_sdk_works_in_the_sandbox(sandbox: Sandbox) -> None:
    sandbox.git.init("repository", initial_branch="main")
    sandbox.files.write("repository/a.txt", "a")
    sandbox.git.add("repository")
    sandbox.git.commit("repository", "first", author_name="A", author_email="a@example.org")
    assert sandbox.git.status("repository").current_branch == "main"
