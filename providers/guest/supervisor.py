"""The first process of a sandbox: takes one request, has a child run it, answers once.

The host's channel is descriptors 0 (in) and 1 (out). User code runs in a child with pipes of its
own; being process 1 the supervisor cannot be signalled from inside, and being non-dumpable it
cannot be read or traced. When it ends, the kernel ends everything else in the sandbox.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import os
import resource
import select
import sys
import time

from . import artifacts, wire
from .child import become_child
from .kernel import adopt_orphans, close_to_others
from .processes import cpu_seconds, kill_others, memory_in_use

MEMORY_CHECK_SECONDS = 0.025


class Child:
    """The process tree that runs user code, and what the supervisor has seen of it."""

    def __init__(self, template: "dict[str, object]") -> None:
        job_in, self.job = os.pipe()
        self.report, report_out = os.pipe()
        self.stdout, stdout_out = os.pipe()
        self.stderr, stderr_out = os.pipe()
        if template["uid"] is not None:
            # The program may open /dev/stdout and the like again, so the pipes must be its own.
            for fd in (stdout_out, stderr_out):
                os.fchown(fd, template["uid"], template["uid"])  # type: ignore[arg-type]
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.job)
            os.close(self.report)
            become_child(template, job_in, report_out, stdout_out, stderr_out)
        for fd in (job_in, report_out, stdout_out, stderr_out):
            os.close(fd)
        self.exit_code: "int | None" = None

    def reap(self, flags: int) -> bool:
        """Collect what has ended, waiting for the first unless `flags` say otherwise.

        False when there is nothing left to wait for.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                return False
            flags = os.WNOHANG
            if pid == 0:
                return True
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def kill_all(self) -> None:
        """End every process of the sandbox but this one, and wait until they are gone."""
        while kill_others():
            # Blocks until something ended; what a dying process leaves behind becomes our child.
            if not self.reap(0):
                break


class Capture:
    """The first `limit` bytes of a pipe; the rest is read and dropped, and counted as truncated."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.truncated = False
        self._room = limit
        self._chunks: "list[bytes]" = []
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take what is there. False at the end of the pipe."""
        try:
            data = os.read(self.fd, 1 << 18)
        except BlockingIOError:
            return True
        if len(data) > self._room:
            self.truncated = True
        self._chunks.append(data[: self._room])
        self._room -= len(self._chunks[-1])
        return bool(data)

    def drain(self) -> None:
        """Everything that is left; only when no writer is alive any more."""
        while self.read():
            pass

    @property
    def content(self) -> bytes:
        return b"".join(self._chunks)


class Run:
    """One request being carried out: the loop over pipes, deadline and memory."""

    def __init__(self, child: Child, request: "dict[str, object]", watch_memory: bool) -> None:
        limits: "dict[str, int]" = request["limits"]  # type: ignore[assignment]
        self.child = child
        self.limits = limits
        self.timed_out = False
        self.out_of_memory = False
        self.memory_peak = 0
        self.done: "dict[str, object] | None" = None
        self.done_parts: "dict[str, bytes]" = {}
        self._watch_memory = watch_memory
        self._cpu_before = cpu_seconds(child.pid)
        self._deadline = time.monotonic() + float(request["timeout"])  # type: ignore[arg-type]
        self.stdout = Capture(child.stdout, limits["output_bytes"])
        self.stderr = Capture(child.stderr, limits["output_bytes"])
        self._reports: "wire.Parser | None" = wire.Parser(limits["result_bytes"] + 4096)

    def follow(self, job: "list[bytes]", wakeup: int, channel: int) -> None:
        """Feed the job in and watch until the child reports, ends, or breaks a limit."""
        poll = select.poll()
        for fd in (self.child.report, self.stdout.fd, self.stderr.fd, wakeup, channel):
            poll.register(fd, select.POLLIN)
        os.set_blocking(self.child.job, False)
        poll.register(self.child.job, select.POLLOUT)
        pending = [memoryview(chunk) for chunk in job]
        job.clear()
        next_check = 0.0
        while self.done is None and self.child.exit_code is None:
            now = time.monotonic()
            if now >= self._deadline:
                self.timed_out = True
                return
            wait = self._deadline - now
            if self._watch_memory:
                if now >= next_check:
                    next_check = now + MEMORY_CHECK_SECONDS
                    if self._memory_exceeded():
                        return
                wait = min(wait, MEMORY_CHECK_SECONDS)
            for fd, _ in poll.poll(wait * 1000 + 1):
                if fd == self.child.job:
                    self._feed(pending)
                    if not pending:
                        poll.unregister(fd)
                elif fd == channel:
                    # The host sends nothing during a run: it has gone, or does not keep to the
                    # protocol. Either way nobody waits for an answer.
                    self.child.kill_all()
                    os._exit(0)
                elif fd == wakeup:
                    os.read(wakeup, 4096)
                    self.child.reap(os.WNOHANG)
                elif not self._take(fd):
                    poll.unregister(fd)

    def _memory_exceeded(self) -> bool:
        used = memory_in_use(self.limits["memory_bytes"])
        self.memory_peak = max(self.memory_peak, used)
        self.out_of_memory = used > self.limits["memory_bytes"]
        return self.out_of_memory

    def _feed(self, pending: "list[memoryview]") -> None:
        """Write what the pipe has room for, and let go of it."""
        try:
            pending[0] = pending[0][os.write(self.child.job, pending[0]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pending.clear()
        if pending and not pending[0]:
            del pending[0]

    def _take(self, fd: int) -> bool:
        """Read one of the child's pipes. False when it has ended."""
        if fd != self.child.report:
            return (self.stdout if fd == self.stdout.fd else self.stderr).read()
        data = os.read(fd, 1 << 16)
        if not data:
            return False
        if self._reports is None:
            return True
        try:
            for header, parts in self._reports.feed(data):
                if header.get("type") == "done" and self.done is None:
                    self.done, self.done_parts = header, parts
        except wire.FrameError:
            # What user code writes here in place of the runner is no report; its exit counts.
            # The pipe is still read, or its writer would wait for ever.
            self._reports = None
        return True

    def finish(self) -> None:
        """End what is left of the program and take in the rest of its output and its report."""
        self.child.kill_all()
        self.stdout.drain()
        self.stderr.drain()
        while self.done is None and not (self.timed_out or self.out_of_memory):
            if not self._take(self.child.report):
                break

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the program alone, without what the child spent on warming up."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return max(0.0, usage.ru_utime + usage.ru_stime - self._cpu_before)

    @property
    def exit_code(self) -> "int | None":
        if self.timed_out or self.out_of_memory:
            return None
        if self.done is not None:
            code = self.done.get("exit_code")
            return code & 0xFF if type(code) is int else 1
        return self.child.exit_code


def answer(run: Run, request_id: object, seconds: float) -> bytes:
    """The answer frame. All in it but the verdicts and measurements is the program's own claim."""
    parts = [("stdout", run.stdout.content), ("stderr", run.stderr.content)]
    has_result = "result" in run.done_parts and run.exit_code == 0
    if has_result:
        parts.append(("result", run.done_parts["result"]))
    files, skipped = artifacts.collect("artifacts", run.limits)
    parts += [(f"artifact:{name}", content) for name, content in files]
    header = {
        "type": "result",
        "id": request_id,
        "exit_code": run.exit_code,
        "timed_out": run.timed_out,
        "out_of_memory": run.out_of_memory,
        "stdout_truncated": run.stdout.truncated,
        "stderr_truncated": run.stderr.truncated,
        "artifacts_skipped": skipped,
        "seconds": seconds,
        "cpu_seconds": run.cpu_seconds,
        "memory_peak_bytes": max(
            run.memory_peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        ),
    }
    return wire.pack(header, parts)


def main() -> None:
    """Be the first process for the template given as JSON in argv[1], channel on 0 and 1."""
    template: "dict[str, object]" = wire.loads(sys.argv[1])  # type: ignore[assignment]
    channel_in, channel_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    supervise(template, channel_in, channel_out)


def supervise(template: "dict[str, object]", channel_in: int, channel_out: int) -> None:
    """Serve the one request that comes over the channel. Never returns.

    What goes wrong before the sandbox is ready is told on standard error.
    """
    os.umask(0o022)
    close_to_others()
    uid: "int | None" = template["uid"]  # type: ignore[assignment]
    os.chdir(str(template["workspace"]))
    os.mkdir("artifacts")
    if uid is not None:
        os.chown("artifacts", uid, uid)
    adopt_orphans()
    wakeup, wakeup_in = os.pipe()
    os.set_blocking(wakeup_in, False)
    _signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    # Process 1 is safe from every signal it has no handler for, and Python has one for this.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    child = Child(template)
    ready = wire.read_frame(child.report, wire.Parser(0))
    if ready is None:
        os.write(2, os.read(child.stderr, 2000))
        os._exit(70)
    # gVisor lets user code open the files, though not the sockets, that process 1 has open.
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    wire.write_all(channel_out, wire.pack({"type": "ready", "python": sys.version.split()[0]}, []))
    frame = wire.read_frame(channel_in, wire.Parser(wire.REQUEST_LIMIT))
    if frame is None:
        os._exit(0)
    request, parts = frame
    began = time.monotonic()
    run = Run(child, request, bool(template.get("watch_memory")))
    job = wire.chunks(
        {
            "entrypoint": request["entrypoint"],
            "timeout": request["timeout"],
            "result_bytes": run.limits["result_bytes"],
        },
        list(parts.items()),
    )
    del frame, parts
    run.follow(job, wakeup, channel_in)
    seconds = time.monotonic() - began
    run.finish()
    wire.write_all(channel_out, answer(run, request["id"], seconds))
    os._exit(0)
