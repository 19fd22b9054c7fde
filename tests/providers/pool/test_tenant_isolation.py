"""Runs of one owner may share a sandbox and notice nothing of each other; two owners never do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import docker
import pytest
from django.conf import settings

from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.launchers.oci import GvisorLauncher
from providers.runtime.pool.launcher import Launcher
from providers.values import InputFile
from tests.conftest import require
from tests.providers.pool.tenant_pools import SHARED, Pair
from tests.support.sandboxes import family, started_by, thread_of
from tests.support.warm_pools import WarmPool

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("runc", "runsc")]


@pytest.fixture(scope="module", params=["bubblewrap", "gvisor", *SLOW])
def shared(request: pytest.FixtureRequest) -> Iterator[WarmPool]:
    """A pool at the level `tenant`: bubblewrap, gVisor, and Docker with either runtime."""
    launcher: Launcher | None = None
    if request.param in ("runc", "runsc"):
        request.getfixturevalue("engine")
        chosen = DockerSettings(runtime=request.param, pool_id=f"tenant-{request.param}")
        launcher = DockerLauncher(chosen)
    else:
        require({"bubblewrap": "bwrap", "gvisor": "runsc"}[request.param])
        if request.param == "gvisor":
            launcher = GvisorLauncher(settings.DATA_DIR, "ptrace")
    with WarmPool(SHARED, launcher=launcher) as pool:
        yield pool


def test_one_owners_runs_share_a_sandbox(shared: WarmPool) -> None:
    pair = Pair(shared, "sharing")
    assert [pair.run(f"print({number})") for number in range(5)] == [f"{n}\n" for n in range(5)]
    assert pair.shared_one


def test_no_file_is_left(shared: WarmPool) -> None:
    pair = Pair(shared, "files")
    pair.run(
        """
        import os
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            os.makedirs(f"{folder}/deep/er/.hidden")
            for path in ("plain", ".hidden", "deep/er/file", "\\u00e9\\udcff"):
                open(f"{folder}/{path}", "w").write("secret")
            os.symlink("/etc", f"{folder}/link")
            os.symlink(f"{folder}/deep", f"{folder}/deep/loop")
            os.mkfifo(f"{folder}/fifo")
            os.chmod(f"{folder}/deep/er", 0)
            os.chmod(f"{folder}/deep", 0o500)
        open("artifacts/kept.txt", "w").write("mine")
        """,
        files=(InputFile("input/data.csv", b"a,b"),),
    )
    seen = pair.run(
        """
        import os
        print(sorted(os.listdir("/workspace")), os.listdir("/workspace/artifacts"))
        print([n for n in os.listdir("/tmp") if n != ".matplotlib"], os.listdir("/dev/shm"))
        """
    )
    assert seen == "['artifacts', 'main.py'] []\n[] []\n"
    assert pair.shared_one


def test_in_a_container_nothing_is_left_either(engine: docker.DockerClient) -> None:
    """All that the tests here ask of containers, in short."""
    launcher = DockerLauncher(DockerSettings(pool_id="tenant-short"))
    with WarmPool(SHARED, launcher=launcher) as pool:
        pair = Pair(pool, "alice")
        pair.run(
            """
            import os, time
            for folder in ("/workspace", "/tmp", "/dev/shm"):
                os.makedirs(f"{folder}/deep/er")
                os.chmod(f"{folder}/deep", 0)
            os.environ["SECRET"] = "1"
            if os.fork() == 0:
                os.setsid()
                time.sleep(100)
            """
        )
        seen = pair.run(
            """
            import os
            print([os.path.exists(f"{place}/deep") for place in ("/workspace", "/tmp", "/dev/shm")])
            print(sum(name.isdigit() for name in os.listdir("/proc")), "SECRET" in os.environ)
            """
        )
        assert seen == "[False, False, False]\n2 False\n"
        assert pair.shared_one
        other = Pair(pool, "charlie")
        other.run("import ctypes; assert ctypes.CDLL(None).shmget(4711, 4096, 0o1666) >= 0")
        other.run("print(1)")
        assert not other.shared_one
        assert not {*other.sandboxes} & {*pair.sandboxes}


def test_a_folder_that_was_closed_is_opened_again(shared: WarmPool) -> None:
    pair = Pair(shared, "closed")
    pair.run(
        """
        import os
        for place in ("/workspace", "/tmp", "/dev/shm"):
            open(f"{place}/left", "w").write("secret")
            try:
                os.chmod(place, 0)
            except PermissionError:
                pass  # it is not the program's
        """
    )
    look = "import os; print([os.path.exists(p + '/left') for p in ('/workspace', '/tmp')])"
    assert pair.run(look) == "[False, False]\n"
    assert pair.shared_one


def test_what_was_put_over_the_images_content_is_gone(shared: WarmPool) -> None:
    pair = Pair(shared, "images content")
    look = """
        import os
        for folder, _, names in os.walk("/tmp"):
            for name in names:
                print(folder, name, hash(open(f"{folder}/{name}").read()))
        """
    code = """
        import os, shutil
        for folder, _, names in os.walk("/tmp"):
            for name in names:
                os.unlink(f"{folder}/{name}")
                open(f"{folder}/{name}", "w").write("forged")
        """
    before = pair.run(look)
    pair.run(code)
    assert pair.run(look) == before
    assert pair.shared_one


def test_what_only_its_maker_may_remove_is_removed(shared: WarmPool) -> None:
    pair = Pair(shared, "sticky")
    pair.run(
        """
        import os
        os.makedirs("/tmp/sticky/deeper")
        open("/tmp/sticky/deeper/file", "w").write("secret")
        for path in ("/tmp/sticky/deeper", "/tmp/sticky"):
            os.chmod(path, 0o1777)
        """
    )
    assert pair.run("import os; print(os.path.exists('/tmp/sticky'))") == "False\n"
    assert pair.shared_one


def test_no_process_is_left(shared: WarmPool) -> None:
    pair = Pair(shared, "processes")
    pair.run(
        """
        import os, signal, time
        for number in range(10):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    time.sleep(1)
        """
    )
    seen = pair.run("import os; print(sum(n.isdigit() for n in os.listdir('/proc')))")
    assert seen == "2\n"
    assert pair.shared_one


def test_no_environment_is_left(shared: WarmPool) -> None:
    pair = Pair(shared, "environment")
    look = "import os; print(sorted(os.environ.items()), os.getcwd(), oct(os.umask(0)))"
    before = pair.run(look)
    pair.run(
        """
        import builtins, json, os, sys
        os.environ["SECRET"] = "1"
        os.environ.pop("HOME")
        os.umask(0o777)
        os.chdir("/tmp")
        builtins.leak = json.leak = sys.leak = "secret"
        json.dumps = None
        """
    )
    assert pair.run(look) == before
    seen = pair.run(
        """
        import builtins, json, sys
        print([hasattr(module, "leak") for module in (builtins, json, sys)], json.dumps(1))
        """
    )
    assert seen == "[False, False, False] 1\n"
    assert pair.shared_one


def test_a_run_that_timed_out_leaves_nothing(shared: WarmPool) -> None:
    pair = Pair(shared, "slow")
    sandbox = shared.acquire("slow")
    pair.sandboxes.append(sandbox.number)
    code = "open('/tmp/left', 'w').write('x')\nwhile True: pass"
    assert shared.run_in(sandbox, code, timeout=0.5).timed_out
    shared.release(sandbox)
    assert pair.run("import os; print(os.path.exists('/tmp/left'))") == "False\n"
    assert pair.shared_one


HOWEVER_A_RUN_ENDS = {
    "well": "open('artifacts/a.txt', 'w').write('x')",
    "with an error": "raise ValueError",
    "by a signal": "import os; os.kill(os.getpid(), 9)",
    "in time": "while True: pass",
    "with descriptors closed": "import os; os.closerange(0, 100); os._exit(0)",
    "with others that hold them open": "import os, time\nos.fork() or time.sleep(99)",
    "in a flood": "while True: print('x' * 100_000)",
}


def test_a_supervisor_keeps_no_descriptor_of_a_run() -> None:
    require("bwrap")
    with WarmPool(SHARED) as pool:
        sandbox = pool.acquire("alice")
        pool.run_in(sandbox, "print(1)")
        pool.release(sandbox)
        pool.settle(idle=1, kept=1)
        tools = started_by(thread_of(pool.loop))
        before = _open_in_supervisors(tools)
        assert len(before) == 2
        for code in HOWEVER_A_RUN_ENDS.values():
            assert pool.acquire("alice") is sandbox
            pool.run_in(sandbox, code, timeout=0.5)
            pool.release(sandbox)
            pool.settle(kept=1)
        assert _open_in_supervisors(tools) == before


def _open_in_supervisors(tools: set[int]) -> dict[int, list[str]]:
    """The open descriptors of each sandbox's first process, which is one in a namespace below
    that of the process it was forked from."""
    found = {}
    for pid in set().union(*map(family, tools)):
        # A process of the run may end while it is read; a supervisor does not.
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if status.partition("NSpid:")[2].partition("\n")[0].split()[2:] == ["1"]:
                found[pid] = sorted(os.listdir(f"/proc/{pid}/fd"))
    return found


def test_every_owner_has_sandboxes_of_its_own(shared: WarmPool) -> None:
    used: dict[str, set[int]] = {"alice": set(), "charlie": set()}
    for owner in ("alice", "charlie") * 3:
        pair = Pair(shared, owner)
        pair.run("print(1)")
        used[owner] |= set(pair.sandboxes)
    assert not used["alice"] & used["charlie"]


LEFT_BEHIND = {
    "shared memory": """
        import ctypes
        assert ctypes.CDLL(None).shmget(4711, 4096, 0o1666) >= 0
    """,
    "a semaphore": """
        import ctypes
        assert ctypes.CDLL(None).semget(4711, 1, 0o1666) >= 0
    """,
    "a message queue": """
        import ctypes
        assert ctypes.CDLL(None).msgget(4711, 0o1666) >= 0
    """,
}


@pytest.mark.parametrize("code", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_what_cannot_be_undone_costs_the_sandbox(shared: WarmPool, code: str) -> None:
    pair = Pair(shared, "hostile")
    pair.run(code)
    pair.run("print(1)")
    assert not pair.shared_one


def test_queues_that_nobody_could_list_cannot_be_made(shared: WarmPool) -> None:
    code = """
        import ctypes, os
        print(ctypes.CDLL(None).mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None))
    """
    assert Pair(shared, "queues").run(code) == "-1\n"


def test_nothing_else_in_a_sandbox_can_be_written_to(shared: WarmPool) -> None:
    code = """
        import os
        writable = set()
        for top, folders, files in os.walk("/", followlinks=False):
            if top.startswith(("/proc", "/sys")):
                folders.clear()
                continue
            if top.startswith("/usr/") and top.count("/") > 2:
                folders.clear()
            for path in (top, *(os.path.join(top, name) for name in files)):
                if os.path.isdir(path) or os.path.isfile(path):
                    if os.access(path, os.W_OK, follow_symlinks=False):
                        writable.add(path)
            folders[:] = [each for each in folders if os.path.join(top, each) not in writable]
        print(sorted(writable))
    """
    seen = Pair(shared, "looking").run(code, timeout=60)
    places = {"/workspace", "/tmp", "/dev/shm", "/workspace/main.py", "/workspace/artifacts"}
    # /tmp is filled anew for each run. No message queue can be made, as another test shows.
    others = {"/tmp/.matplotlib", "/dev/mqueue"}
    # The workspace has two names.
    found = {path.replace("/home/user", "/workspace") for path in eval(seen)}
    found = {path for path in found if not path.startswith("/tmp/.matplotlib/")}
    assert found <= places | others
