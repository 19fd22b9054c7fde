"""Without root the same promises hold, by user namespaces and a supervisor that watches memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.lent_users import COUNT
from tests.support.processes import ROOT
from tests.support.sandboxes import LocalProcess
from tests.support.without_root import without_root


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "lent"])
def unprivileged(request: pytest.FixtureRequest) -> Iterator[LocalProcess]:
    require("bwrap")
    with without_root(lent=request.param, launcher="bubblewrap", pool_size=2) as process:
        yield process


def test_gvisor_needs_no_root_either() -> None:
    require("runsc")
    with without_root(launcher="gvisor", gvisor_platform="ptrace", pool_size=1) as process:
        result = process.run("import os\nprint(os.getuid() != 0)")
        assert (result["stdout"], result["runtime"]) == ("True\n", "gvisor")
        result = process.run("x = []\nwhile True: x.append(bytearray(10**6))")
        assert (result["out_of_memory"], result["timed_out"]) == (True, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_project_that_only_root_can_read_serves_another_user(tmp_path: Path) -> None:
    require("bwrap")
    project = tmp_path / "closed" / "project"
    for name in ("providers", "tests"):
        skipped = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / name, project / name, ignore=skipped)
    for path in (project, *project.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    project.parent.chmod(0o700)
    with without_root(launcher="bubblewrap", pool_size=1, project=project) as process:
        assert process.run("print(6 * 7)")["stdout"] == "42\n"


def test_code_runs_without_privileges_in_namespaces_of_its_own(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        """
        import os
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print(os.getuid(), int(status["CapEff"], 16), int(status["CapPrm"], 16),
              status["NoNewPrivs"].strip(), status["Seccomp"].strip())
        for name in sorted(os.listdir("/proc/self/ns")):
            print(os.readlink(f"/proc/self/ns/{name}"))
        """
    )
    first, *inside = result["stdout"].splitlines()
    uid, *others = first.split()
    assert (result["runtime"], others) == ("bubblewrap", ["0", "0", "1", "2"])
    lent = result["metadata"]["enforced_by"]["users"] == "uid per sandbox (subordinate)"
    assert 0 < int(uid) < COUNT if lent else uid == "1000"
    ours = {os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    shared = {name.partition(":")[0] for name in ours & set(inside)}
    assert shared <= {"time", "time_for_children"}


def test_memory_is_watched_by_the_supervisor(unprivileged: LocalProcess) -> None:
    result = unprivileged.run("x = []\nwhile True: x.append(bytearray(10**6))", timeout=60)
    assert (result["out_of_memory"], result["timed_out"]) == (True, False)


def test_memory_of_all_processes_together_is_watched(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                kept = bytearray(60 * 2**20)
                time.sleep(100)
        time.sleep(100)
        """,
        timeout=10,
    )
    assert result["out_of_memory"] is True


def test_a_fork_bomb_is_held_to_its_own_sandbox(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        """
        import os, time
        made = 0
        try:
            while made < 500:
                if os.fork() == 0:
                    time.sleep(100)
                made += 1
        except BlockingIOError:
            print("refused", made < 100)
        """
    )
    assert result["stdout"] == "refused True\n"
    assert unprivileged.run("print(1)")["stdout"] == "1\n"


def test_a_daemonised_child_is_killed_on_timeout(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)", timeout=0.5
    )
    assert result["timed_out"] is True
    assert unprivileged.run("print(1)")["stdout"] == "1\n"


def test_sandboxes_do_not_see_each_other(unprivileged: LocalProcess) -> None:
    unprivileged.run("open('/tmp/left', 'w'); open('/dev/shm/left', 'w'); open('left', 'w')")
    result = unprivileged.run(
        "import os\nprint([os.path.exists(p) for p in ('/tmp/left', '/dev/shm/left', 'left')])\n"
        "try: open('/dev/left', 'w')\nexcept OSError as error: print(type(error).__name__)"
    )
    assert result["stdout"].splitlines()[0] == "[False, False, False]"
    assert result["stdout"].splitlines()[1] in ("OSError", "PermissionError")


def test_the_supervisor_cannot_be_read(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        """
        import os
        for name in ("mem", "environ", "maps", "fd", "ns/net"):
            try:
                look = {"fd": os.listdir, "ns/net": os.readlink}.get(name, lambda p: open(p).read(1))
                look(f"/proc/1/{name}")
                print("read", name)
            except OSError:
                pass
        """
    )
    assert (result["stdout"], result["stderr"]) == ("", "")


def test_memory_that_processes_share_is_watched_too(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        """
        import mmap
        files = [open(f"/dev/shm/{number}", "wb+") for number in range(8)]
        for file in files:
            file.truncate(50 << 20)
        maps = [mmap.mmap(file.fileno(), 50 << 20) for file in files[:2]]
        kept = [bytearray(2**20) for _ in range(150)]
        for m in maps:
            m.write(b"x" * (50 << 20))
        open("more", "wb").write(b"x" * (60 << 20))
        """,
        timeout=10,
    )
    assert (result["out_of_memory"], result["timed_out"]) == (True, False)


def test_memory_that_processes_share_is_counted_once(unprivileged: LocalProcess) -> None:
    result = unprivileged.run(
        """
        import mmap, os, time
        file = open("/dev/shm/shared", "wb+")
        file.truncate(60 << 20)
        m = mmap.mmap(file.fileno(), 60 << 20)
        kept = b"x" * (60 << 20)
        m.write(kept)
        for _ in range(8):
            if os.fork() == 0:
                sum(m[::4096]), sum(kept[::4096])
                time.sleep(100)
        time.sleep(0.5)
        print("within bounds")
        """
    )
    assert (result["stdout"], result["out_of_memory"]) == ("within bounds\n", False)


@pytest.mark.parametrize(
    "make",
    [
        "os.memfd_create('hidden')",
        "ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600)",
    ],
)
def test_memory_that_nobody_could_count_cannot_be_had(
    unprivileged: LocalProcess, make: str
) -> None:
    code = f"import ctypes, os\ntry:\n    print({make})\nexcept OSError: print(-1)"
    assert unprivileged.run(code)["stdout"] == "-1\n"


@pytest.mark.parametrize(
    "reach",
    [
        "resource.prlimit(1, resource.RLIMIT_AS, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "os.sched_setaffinity(1, {0})",
    ],
)
def test_the_supervisor_is_out_of_reach_where_it_is_the_same_user(
    unprivileged: LocalProcess, reach: str
) -> None:
    result = unprivileged.run(f"import os, resource\n{reach}")
    assert (result["exit_code"], "PermissionError" in result["stderr"]) == (1, True)
