"""The time that a run is said to have used is that of all its processes, waited for or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.support.docker_engine import Containers
from tests.support.sandboxes import Local, LocalProcess
from tests.support.without_root import without_root

# Nobody waits for the child, so that its time is added to nobody's.
UNWAITED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    while time.process_time() < 0.6: pass
    os._exit(0)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("ended")
"""


@pytest.fixture(scope="module")
def ordinary() -> Iterator[LocalProcess]:
    require("bwrap")
    with without_root(launcher="bubblewrap", pool_size=1) as process:
        yield process


def test_a_child_that_nobody_waits_for_counts(bubblewrap: Local) -> None:
    result = bubblewrap.run(UNWAITED)
    assert result.stdout == "ended\n"
    assert 0.5 < result.metadata["cpu_seconds"] < 2


def test_a_child_that_nobody_waits_for_counts_without_root(ordinary: LocalProcess) -> None:
    result = ordinary.run(UNWAITED)
    assert 0.5 < result["metadata"]["cpu_seconds"] < 2


def test_what_a_run_used_before_is_not_counted_again(bubblewrap: Local) -> None:
    assert bubblewrap.run("print(1)").metadata["cpu_seconds"] < 0.3


def test_all_threads_count(ordinary: LocalProcess) -> None:
    result = ordinary.run(
        """
        import hashlib, threading, time
        def work():
            while time.thread_time() < 0.3: hashlib.sha256(bytes(1 << 20))
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    )
    assert 0.5 < result["metadata"]["cpu_seconds"] < 2


def test_a_child_that_nobody_waits_for_counts_in_a_container(under_runc: Containers) -> None:
    result = under_runc.run(UNWAITED)
    assert 0.5 < result.metadata["cpu_seconds"] < 2
