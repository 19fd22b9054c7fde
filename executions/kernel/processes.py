"""Processes that start together and end together, whatever ends them.

Nothing here may leave an orphan behind: a sandbox that outlives its service is code running
unwatched. Linux only, like the sandboxes themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from executions.kernel.own_process import adopt_orphans, die_with_parent

# What a process may take that was told to end now.
GRACE_SECONDS = 4.0
TELL_SECONDS = 5.0
# Before a process that has ended is started again.
RESTART_SECONDS = 10.0

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_WATCHED_SIGNALS = _STOP_SIGNALS | {signal.SIGCHLD}


class ForkedProcess(BaseException):
    """Leaves, in a process that was just forked, all that its parent was in the middle of.

    The command catches it and calls `run`. The process then ends as a program of its own does.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run


class _Child(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


class _Fork:
    """A forked child, used as one of `subprocess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ProcessGroup:
    """Named child processes. Leaving the context ends them, with all that they have started.

    SIGINT and SIGTERM are held back inside the context: the first ends `wait`, the second makes
    `stop` hurry, and none interrupts the cleaning up.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._children: dict[str, _Child] = {}
        self._restarts: dict[str, Callable[[], subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> ProcessGroup:
        # Whatever a child leaves behind when it dies becomes our child, and is found at the end.
        adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._pid:
            return
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

    def fork(self, name: str, run: Callable[[], None]) -> None:
        """Start a process that shares the memory of this one and does `run`, as `start` does.

        In the new process this raises ForkedProcess. Nothing of this process is to be in it but
        what is loaded: no thread, and no connection to a database.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            self._children[name] = _Fork(pid)
            return
        try:
            os.setsid()
            _prepare(self._pid)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
        except BaseException:
            traceback.print_exc()
            # Not as the parent, whose children it would end.
            os._exit(1)
        raise ForkedProcess(run)

    def start_helper(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process whose end ends nothing; it is killed with the rest."""
        self._spawn(command, environment)

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_prepare, os.getpid()),
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
                child.send_signal(signal.SIGTERM)
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

    def _alive(self, names: Sequence[str]) -> dict[str, _Child]:
        found = {name: self._children[name] for name in names if name in self._children}
        return {name: child for name, child in found.items() if child.poll() is None}

    def _reap_adopted(self) -> None:
        ours = {child.pid for child in self._children.values()}
        for pid in _children():
            if pid not in ours:
                os.waitpid(pid, os.WNOHANG)


def _prepare(parent: int) -> None:
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED_SIGNALS)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill_children() -> None:
    """Until none is left: the children of a killed one become ours."""
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
