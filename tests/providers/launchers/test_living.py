"""A process of this machine is told dead by the kernel, and by nothing that only hides it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from providers import process_liveness
from providers.remote import reclaim
from tests.support.processes import ROOT

HIDDEN = """
mount -t proc -o hidepid=invisible proc /proc
exec setpriv --reuid 65534 --regid 65534 --clear-groups /usr/bin/python3 -I -c "$1" "$2" "$3"
"""
SEES = Path(process_liveness.__file__).read_text() + (
    "\nimport sys"
    "\nprint(os.path.exists(f'/proc/{sys.argv[1]}'), has_ended(int(sys.argv[1]), sys.argv[2]))"
)


def tag_of(pid: int) -> str:
    return f"{reclaim.process_tag().split('-')[0]}-{pid}-{process_liveness.birth(pid)}"


def test_one_that_was_killed_has_ended_before_and_after_its_parent_has_looked() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tag = tag_of(process.pid)
    assert (reclaim.has_ended_here(tag), reclaim.lives_here(tag)) == (False, True)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (reclaim.has_ended_here(tag), reclaim.lives_here(tag)) == (True, False)
    process.communicate()
    assert (reclaim.has_ended_here(tag), reclaim.lives_here(tag)) == (True, False)


def test_another_one_with_its_number_is_not_it() -> None:
    host, pid, born = reclaim.process_tag().split("-")
    assert reclaim.has_ended_here(f"{host}-{pid}-{int(born) - 1}") is True
    assert reclaim.has_ended_here(reclaim.process_tag()) is False


@pytest.mark.parametrize(
    "tag",
    ["", "x", "0-1-2-3", "{host}-{gone}", "{host}-x-1", "{host}-{long}-1", "elsewhere-{gone}-1"],
)
def test_of_what_is_not_known_nothing_is_said(tag: str) -> None:
    host = reclaim.process_tag().split("-")[0]
    said = tag.format(host=host, gone=2**22, long=2**70)
    assert (reclaim.has_ended_here(said), reclaim.lives_here(said)) == (False, False)


def test_one_that_was_started_at_no_known_time_has_ended_when_its_number_is_free() -> None:
    assert process_liveness.has_ended(os.getpid(), "0") is False
    assert process_liveness.lives(os.getpid(), "0") is False
    assert process_liveness.has_ended(2**22, "0") is True


def test_one_that_proc_does_not_show_lives() -> None:
    """As for a service with systemd's ProtectProc, beside a command of another user's."""
    if os.getuid() != 0:
        pytest.skip("needs root, to mount")
    pid, born = str(os.getpid()), process_liveness.birth(os.getpid())
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", HIDDEN, "sh", SEES, pid, born],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")


LEADERLESS = """
import ctypes, os, threading
def work():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(") ")[2][0] != "Z": pass
    print("alone", flush=True)
    input()
threading.Thread(target=work).start()
# exit, of this thread alone
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
"""


def test_one_whose_first_thread_has_ended_lives_as_long_as_the_others() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        tag = tag_of(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == b"alone\n"
        assert reclaim.has_ended_here(tag) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert reclaim.has_ended_here(tag) is True


TOLD = """
import os, sys, time
from providers.remote import reclaim
if sys.argv[1:]:
    print(reclaim.has_ended_here(sys.argv[1]))
else:
    hosts = {reclaim.process_tag().split("-")[0]}
    for _ in range(2):
        told, tell = os.pipe()
        if os.fork() == 0:
            os.write(tell, reclaim.process_tag().split("-")[0].encode())
            os._exit(0)
        os.wait()
        hosts.add(os.read(told, 100).decode())
    print(len(hosts))
"""


def in_namespace(option: str, *arguments: str) -> str:
    if os.getuid() != 0:
        pytest.skip("needs root, to make namespaces")
    return subprocess.run(
        ["unshare", *option.split(), sys.executable, "-c", TOLD, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.strip()


def test_one_whose_birth_is_told_in_another_time_lives() -> None:
    """As for a container that shares the machine's processes and not its clock."""
    assert in_namespace("--time --boottime 100000", tag_of(os.getpid())) == "False"


def test_where_proc_is_another_namespaces_no_fork_knows_of_the_other() -> None:
    assert in_namespace("--pid --fork") == "3"
