"""Where users are lent to an ordinary user, each of his sandboxes is somebody else."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers.errors import CreationFailed
from providers.runtime.launchers.guest_files import find_python
from providers.runtime.launchers.subordinate_users import BLOCK, SubordinateUsers
from tests.conftest import require
from tests.support.lent_users import COUNT, first_lent, ordinary_user
from tests.support.sandboxes import LocalProcess, children, family, wait_until_gone
from tests.support.waiting import wait_until
from tests.support.without_root import without_root

USERS = "uid per sandbox (subordinate)"

# Each takes what it can, and then says by its name that there was no more.
HOG_PIPES = """
    import fcntl, os, time
    F_GETPIPE_SZ = 1032
    for _ in range(30):
        if os.fork() == 0:
            name, kept = open("/proc/self/comm", "w"), []
            try:
                while True:
                    kept.append(os.pipe())
            except OSError:
                pass
            size = fcntl.fcntl(kept[-1][0], F_GETPIPE_SZ)
            name.write("starved" if size < 65536 else "has enough")
            name.flush()
            time.sleep(100)
    time.sleep(100)
"""
QUEUE_SIGNALS = """
    import ctypes, os, signal, time
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    queued = 0
    while ctypes.CDLL(None).sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0:
        queued += 1
"""
HOG_SIGNALS = f"""{QUEUE_SIGNALS}
    open("/proc/self/comm", "w").write("starved")
    time.sleep(100)
"""
NEW_PIPE = "import fcntl, os; print(fcntl.fcntl(os.pipe()[0], 1032))"


@pytest.fixture(scope="module")
def user() -> Iterator[int]:
    require("bwrap")
    with ordinary_user() as uid:
        yield uid


@pytest.fixture(scope="module")
def good(user: int) -> Iterator[LocalProcess]:
    """A service of that user for tests that leave it as it is."""
    with without_root(user, launcher="bubblewrap", pool_size=3) as service:
        yield service


def _status(pid: int, field: str) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return next(line.split()[1:] for line in lines if line.startswith(f"{field}:"))


def _users(process: LocalProcess) -> list[int]:
    """As whom its sandboxes run: their first processes, which the zygote has forked."""
    (tool,) = children(process.process.pid)
    (zygote,) = children(tool)
    found = []
    for sandbox in children(zygote):
        users = {*_status(sandbox, "Uid"), *_status(sandbox, "Gid")}
        # One that is being made is the zygote's user still.
        if len(users) == 1 and (uid := int(users.pop())) != int(_status(zygote, "Uid")[0]):
            found.append(uid)
    return found


def _wait_for_warm(process: LocalProcess, count: int) -> list[int]:
    wait_until(lambda: len(_users(process)) >= count, seconds=60)
    return _users(process)


def _wait_for_hog(process: LocalProcess) -> None:
    wait_until(
        lambda: any(_status(pid, "Name") == ["starved"] for pid in family(process.process.pid)),
        seconds=20,
    )


def test_no_two_sandboxes_are_one_user_of_the_machine(user: int, good: LocalProcess) -> None:
    with without_root(user, launcher="bubblewrap", pool_size=3) as another:
        services = (good, another)
        for service in services:
            assert service.run("print(1)")["metadata"]["enforced_by"]["users"] == USERS
        found = [uid for service in services for uid in _wait_for_warm(service, 3)]
    assert len(set(found)) == len(found) >= 6
    assert all(first_lent() <= uid < first_lent() + COUNT for uid in found)
    assert len({(uid - first_lent()) // BLOCK for uid in found}) == 2


def test_nobody_can_make_pipes_scarce_for_others(user: int, good: LocalProcess) -> None:
    with without_root(user, launcher="bubblewrap", pool_size=1) as bad:
        bad.start(HOG_PIPES, timeout=30)
        _wait_for_hog(bad)
        assert good.run(NEW_PIPE)["stdout"] == "65536\n"
        service = subprocess.run(
            [find_python(), "-I", "-c", NEW_PIPE],
            user=user,
            group=user,
            extra_groups=[],
            capture_output=True,
            text=True,
        )
        assert service.stdout == "65536\n"
        bad.process.kill()


def test_nobody_can_make_waiting_signals_scarce_for_others(user: int, good: LocalProcess) -> None:
    with without_root(user, launcher="bubblewrap", pool_size=1) as bad:
        bad.start(HOG_SIGNALS, timeout=30)
        _wait_for_hog(bad)
        assert good.run(f"{QUEUE_SIGNALS}\n    print(queued)")["stdout"] == "1024\n"
        bad.process.kill()


def test_nothing_survives_a_killed_service(user: int) -> None:
    with without_root(user, launcher="bubblewrap", pool_size=2) as service:
        daemon = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(100)"
        service.start(daemon, timeout=60)
        _wait_for_warm(service, 3)
        running = family(service.process.pid)
        service.process.kill()
        wait_until_gone(running)


def test_a_kept_sandbox_is_clean_for_the_owners_next_run(user: int) -> None:
    owned = {"isolation": "tenant", "owner": "alice"}
    with without_root(user, launcher="bubblewrap", pool_size=1, **owned) as service:
        code = """
            import os
            places = ['/tmp', '/dev/shm', '/workspace']
            print(os.getuid(), [os.path.exists(f"{place}/left") for place in places])
            for place in places:
                os.makedirs(f"{place}/left/closed")
                os.chmod(f"{place}/left", 0)
        """
        seen: list[str] = []

        def meets_a_user_again() -> bool:
            result = service.run(code)
            uid, found = result["stdout"].split(" ", 1)
            assert (found, result["stderr"]) == ("[False, False, False]\n", "")
            seen.append(uid)
            # Nobody else would have this user so soon: it is the same sandbox.
            return uid in seen[:-1]

        wait_until(meets_a_user_again, seconds=60)


@pytest.mark.parametrize(
    "lent",
    [
        {"users": 0},
        {"groups": 0},
        {"users": BLOCK - 1},
    ],
)
def test_without_enough_of_them_all_is_as_it_was(lent: dict[str, int]) -> None:
    require("bwrap")
    with (
        ordinary_user(**lent) as user,
        without_root(user, launcher="bubblewrap", pool_size=1) as service,
    ):
        result = service.run("import os\nprint(os.getuid())")
    assert result["stdout"] == "1000\n"
    assert result["metadata"]["enforced_by"]["users"] == "user namespace per sandbox"


def test_a_user_is_handed_out_again_only_when_it_was_given_back() -> None:
    with socket.socket(socket.AF_UNIX) as claim:
        users = SubordinateUsers([], 1000, claim)
        taken = [users.take() for _ in range(BLOCK)]
        assert sorted(taken) == list(range(1000, 1000 + BLOCK))
        with pytest.raises(CreationFailed):
            users.take()
        users.give_back(1007)
        assert users.take() == 1007


def test_whoever_was_given_back_last_comes_last() -> None:
    with socket.socket(socket.AF_UNIX) as claim:
        users = SubordinateUsers([], 1000, claim)
        handed_out = []
        for _ in range(BLOCK):
            handed_out.append(users.take())
            users.give_back(handed_out[-1])
        assert len(set(handed_out)) == BLOCK
