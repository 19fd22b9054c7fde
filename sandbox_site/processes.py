"""Processes that start together and end together, whatever ends them.

Nothing here may leave an orphan behind: a sandbox that outlives its service is code running
unwatched. Linux only, like the sandboxes themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 4.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_WATCHED_SIGNALS = _STOP_SIGNALS | {signal.SIGCHLD}
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent`, which started it, is gone.

    Survives exec but not fork: each child has to ask for itself.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def descendants_die_with_parents() -> None:
    """Have every process forked from now on, by us or by a child of ours, die with its parent."""
    parent = os.getpid()

    def ask() -> None:
        nonlocal parent
        die_with_parent(parent)
        parent = os.getpid()

    os.register_at_fork(after_in_child=ask)


class ProcessGroup:
    """Named child processes. Leaving the context ends them, with all that they have started.

    They get GRACE_SECONDS to end by themselves. SIGINT and SIGTERM are held back inside the
    context, so that a second one cannot interrupt the cleaning up after the first.
    """

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ProcessGroup:
        # Whatever a child leaves behind when it dies becomes our child, and is found at the end.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_gently()
        _kill_children()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process in a session of its own, so that Ctrl-C reaches it through us alone."""
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED_SIGNALS)

        self._children[name] = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=prepare,
        )

    def wait(self) -> tuple[str, int] | None:
        """The name and exit code of the first process to end, or None when told to stop."""
        while signal.sigwait(_WATCHED_SIGNALS) not in _STOP_SIGNALS:
            for name, child in self._children.items():
                if (code := child.poll()) is not None:
                    return name, code
            self._reap_adopted()
        return None

    def _reap_adopted(self) -> None:
        ours = {child.pid for child in self._children.values()}
        for pid in _children():
            if pid not in ours:
                os.waitpid(pid, os.WNOHANG)

    def _end_gently(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill_children() -> None:
    """Until none is left: the children of a killed one become ours."""
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
