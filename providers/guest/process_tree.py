"""The processes of one program, from the first one's fork to the last one's end."""

import os

from .child import become_child
from .processes import kill_others

# The signal that the system call filter ends a process with. The module `signal` is dear to import.
SIGSYS = 31


class Child:
    """The process tree that runs user code, and what the supervisor has seen of it."""

    def __init__(self, template: "dict[str, object]") -> None:
        job_in, self.job = os.pipe()
        self.report, report_out = os.pipe()
        self.stdout, stdout_out = os.pipe()
        self.stderr, stderr_out = os.pipe()
        stop_in, self.stop = os.pipe() if template["language"] == "nodejs" else (-1, -1)
        if template["uid"] is not None:
            # The program may open /dev/stdout and the like again, so the pipes must be its own.
            for fd in (stdout_out, stderr_out):
                os.fchown(fd, template["uid"], template["uid"])  # type: ignore[arg-type]
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
