"""The processes of one program, from the first one's fork to the last one's end."""

import itertools
import os

from .child import become_child
from .processes import kill_others

# The signal that the system call filter ends a process with. The module `signal` is dear to import.
SIGSYS = 31

# Of a kept sandbox whose supervisor is root, each program has one. None is used twice.
_groups = itertools.count(1 << 20)


def with_group(template: "dict[str, object]") -> "dict[str, object]":
    """The template for a program beside others of its user: with a group of its own, to which its
    pipes and its terminal belong. Where the user is no other than we are, `kernel.keep_apart` does
    what that is for."""
    return template if template["uid"] is None else {**template, "group": next(_groups)}


def open_pipe(template: "dict[str, object]") -> "tuple[int, int]":
    """A pipe for a program, which may open it again as /dev/stdout and the like. Raises OSError.

    The user owns it, or the program's own group. gVisor has a fixed mode for a pipe without a
    name, so that this one has a name until it is open, in a folder that no program can write to.
    """
    if template["uid"] is None:
        return os.pipe()
    if "group" not in template:
        ends = os.pipe()
        os.fchown(ends[1], template["uid"], template["uid"])  # type: ignore[arg-type]
        return ends
    name = f"/dev/pipe-{template['group']}"
    os.mkfifo(name, 0o600)
    try:
        read = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        try:
            write = os.open(name, os.O_WRONLY)
        except OSError:
            os.close(read)
            raise
    finally:
        os.unlink(name)
    os.set_blocking(read, True)
    give_to_group(write, template)
    return read, write


def give_to_group(fd: int, template: "dict[str, object]") -> None:
    """Let nobody open a named pipe or a terminal but the template's group, and us."""
    os.fchown(fd, os.getuid(), template["group"])  # type: ignore[arg-type]
    os.fchmod(fd, 0o660)


class Child:
    """The process tree that runs user code, and what the supervisor has seen of it."""

    def __init__(self, template: "dict[str, object]") -> None:
        """With a `group` in the template other programs of its user may run beside it."""
        job_in, self.job = os.pipe()
        self.report, report_out = os.pipe()
        self.stdout, stdout_out = open_pipe(template)
        self.stderr, stderr_out = open_pipe(template)
        stop_in, self.stop = os.pipe() if template["language"] == "nodejs" else (-1, -1)
        try:
            self.pid = os.fork()
        except OSError:
            # A kept sandbox whose program has used up the processes tries again later.
            _close(job_in, report_out, stdout_out, stderr_out, stop_in)
            self.close()
            raise
        if self.pid == 0:
            become_child(template, job_in, report_out, stdout_out, stderr_out, stop_in)
        _close(job_in, report_out, stdout_out, stderr_out, stop_in)
        self.exit_code: "int | None" = None
        self.cpu_seconds = 0.0
        self.memory_peak = 0
        # Of those that nobody else has waited for: how many SIGSYS ended, and how many there still
        # were when all were ended.
        self.sigsys = 0
        self.left = 0
        self._reaped = 0

    def close(self) -> None:
        """Give back the pipes; every process is gone."""
        _close(self.job, self.report, self.stdout, self.stderr, self.stop)

    def reap(self, flags: int) -> bool:
        """Collect what has ended, waiting for the first unless `flags` say otherwise.

        False when there is nothing left to wait for.
        """
        while True:
            try:
                pid, status, usage = os.wait4(-1, flags)
            except ChildProcessError:
                return False
            flags = os.WNOHANG
            if pid == 0:
                return True
            self._reaped += 1
            self.sigsys += os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGSYS
            self.cpu_seconds += usage.ru_utime + usage.ru_stime
            self.memory_peak = max(self.memory_peak, usage.ru_maxrss * 1024)
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def kill_all(self) -> None:
        """End every process of the sandbox but this one, and wait until they are gone."""
        before = self._reaped
        while kill_others():
            # Blocks until something ended; what a dying process leaves behind becomes our child.
            if not self.reap(0):
                break
        self.left = max(self.left, self._reaped - before)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
