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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

# What a process may take that was told to end now.
GRACE_SECONDS = 4.0
TELL_SECONDS = 5.0
# Before a process that has ended is started again.
RESTART_SECONDS = 10.0

LARGE_BYTES = 256 * 1024

_M_MMAP_THRESHOLD = -3
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


def give_back_large_blocks() -> None:
    """Have the C library give blocks of LARGE_BYTES and more back to the system as soon as they are
    free. By itself it keeps the more of them the larger they were; another C library does as it
    does."""
    if mallopt := getattr(_libc, "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


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

    SIGINT and SIGTERM are held back inside the context: the first ends `wait`, the second makes
    `stop` hurry, and none interrupts the cleaning up.
    """

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: dict[str, Callable[[], subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> ProcessGroup:
        # Whatever a child leaves behind when it dies becomes our child, and is found at the end.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop([list(self._children)], seconds=0, ending_seconds=GRACE_SECONDS)
        _kill_children()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        restarts: bool = False,
    ) -> None:
        """Start a process in a session of its own, so that Ctrl-C reaches it through us alone. One
        that `restarts` is started again when it has ended, and ends nothing."""
        self._children[name] = self._spawn(command, environment)
        if restarts:
            self._restarts[name] = partial(self._spawn, command, environment)

    def start_helper(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process whose end ends nothing; it is killed with the rest."""
        self._spawn(command, environment)

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED_SIGNALS)

        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=prepare,
        )

    def wait(
        self, tell: Callable[[str, int], None] = lambda name, code: None
    ) -> tuple[str, int] | None:
        """The name and exit code of the first process to end, or None when told to stop. `tell`
        hears of one that is started again."""
        due: dict[str, float] = {}
        while True:
            # A signal may stand for the ends of several processes.
            came = signal.sigtimedwait(_WATCHED_SIGNALS, RESTART_SECONDS / 10 if due else 3600)
            if came is not None and came.si_signo in _STOP_SIGNALS:
                return None
            for name, child in self._children.items():
                if (code := child.poll()) is None or name in due:
                    continue
                if name not in self._restarts:
                    return name, code
                due[name] = time.monotonic() + RESTART_SECONDS
                tell(name, code)
            for name in [name for name, at in due.items() if at <= time.monotonic()]:
                try:
                    self._children[name] = self._restarts[name]()
                except OSError:
                    # There is no room for it now, and the others go on.
                    due[name] += RESTART_SECONDS
                else:
                    del due[name]
            self._reap_adopted()

    def stop(
        self,
        stages: Sequence[Sequence[str]],
        *,
        seconds: float,
        ending_seconds: float,
        tell: Callable[[list[str], float], None] = lambda names, left: None,
    ) -> None:
        """Tell the named processes to end, one stage after the other, and wait for each.

        They have `seconds` each stage. After that, and at once when we are signalled, they are
        told to end now, for which they have `ending_seconds`. `tell` hears whom is waited for,
        and how long at most.
        """
        is_hurried = seconds <= 0
        for names in stages:
            for child in self._alive(names).values():
                child.terminate()
            if not is_hurried:
                is_hurried = not self._wait_for(names, seconds, tell)
            if is_hurried:
                for child in self._alive(names).values():
                    child.send_signal(signal.SIGQUIT)
                self._wait_for(names, ending_seconds, tell, is_told=True)

    def _wait_for(
        self,
        names: Sequence[str],
        seconds: float,
        tell: Callable[[list[str], float], None],
        *,
        is_told: bool = False,
    ) -> bool:
        """Whether they have ended: in time, and before a signal that asks for it unless told."""
        end = time.monotonic() + seconds
        next_line = time.monotonic() + (TELL_SECONDS if is_told else 0.5)
        while alive := self._alive(names):
            now = time.monotonic()
            if now >= end:
                return False
            if now >= next_line:
                next_line = now + TELL_SECONDS
                tell(sorted(alive), end - now)
            came = signal.sigtimedwait(_WATCHED_SIGNALS, min(end, next_line) - now)
            if came is not None and came.si_signo in _STOP_SIGNALS and not is_told:
                return False
            self._reap_adopted()
        return True

    def _alive(self, names: Sequence[str]) -> dict[str, subprocess.Popen[bytes]]:
        found = {name: self._children[name] for name in names if name in self._children}
        return {name: child for name, child in found.items() if child.poll() is None}

    def _reap_adopted(self) -> None:
        ours = {child.pid for child in self._children.values()}
        for pid in _children():
            if pid not in ours:
                os.waitpid(pid, os.WNOHANG)


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
