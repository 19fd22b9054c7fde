"""Carries out one request: the loop over pipes, deadline and memory, and the answer."""

import math
import os
import select
import time

from . import advice, artifacts, program, wire
from .capture import STDERR, STDOUT, Bundles, Capture, Order
from .memory import Memory
from .process_tree import Child
from .processes import Times, activity, cpu_seconds, last_number
from .wire import EXCEPTION_BYTES

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from .cell import Cell
    from .run_network import RunNetwork
    from .stream import Stream

MEMORY_CHECK_SECONDS = 0.025
# How long a program may take to end once nothing of it is left to run, and what it has started.
END_SECONDS = 1.0
IDLE_SECONDS = 0.03


class Run:
    """One request being carried out: the loop over pipes, deadline and memory."""

    def __init__(
        self,
        child: Child,
        request: "dict[str, object]",
        memory: "Memory | None",
        *,
        advised: bool = False,
        stream: "Stream | None" = None,
        language: str = "python",
        network: "Stream | None" = None,
    ) -> None:
        """`stream` takes what is put out, and `network` is where connections go, if anywhere."""
        limits: "dict[str, int]" = request["limits"]  # type: ignore[assignment]
        self.child = child
        self.language = language
        self.limits = limits
        self.timed_out = False
        self.out_of_memory = False
        self.memory_peak = 0
        self.done: "dict[str, object] | None" = None
        self.done_parts: "dict[str, bytes]" = {}
        self._ending: "dict[str, object] | None" = None
        self._end_by = math.inf
        self._pending: "list[memoryview]" = []
        self.order = Order()
        self.outputs = Bundles(limits)
        self.remarks: "list[list[object]] | None" = None
        self.remarks_dropped = 0
        self._advised = advised
        self._memory = memory
        self._stream = stream
        self._out = network or stream
        self._has_network = network is not None
        self._network: "RunNetwork | None" = None
        self._times = Times()
        self._cpu_before = cpu_seconds(child.pid)
        self._number_before = last_number()
        self.processes_started: "int | None" = None
        self._deadline = time.monotonic() + float(request["timeout"])  # type: ignore[arg-type]
        bound, take = limits["output_bytes"], stream.take if stream else None
        self.stdout = Capture(child.stdout, bound, STDOUT, self.order, take)
        self.stderr = Capture(child.stderr, bound, STDERR, self.order, take)
        self._reports: "wire.Parser | None" = wire.Parser(
            max(limits["result_bytes"], limits["rich_output_bytes"], EXCEPTION_BYTES) + 4096
        )

    def follow(self, job: "list[bytes]", wakeup: int, channel: int) -> None:
        """Feed the job in and watch until the child reports, ends, or breaks a limit."""
        poll = select.poll()
        for fd in (self.child.report, self.stdout.fd, self.stderr.fd, wakeup, channel):
            poll.register(fd, select.POLLIN)
        if self._has_network and self._out is not None:
            # Only here: most have none.
            from .run_network import RunNetwork

            self._network = RunNetwork(poll, self._out)
        self._pending = [memoryview(chunk) for chunk in job]
        job.clear()
        if sum(map(len, self._pending)) <= select.PIPE_BUF:
            # An empty pipe takes so much at once.
            self._pending = [memoryview(b"".join(self._pending))]
            self._feed()
        else:
            os.set_blocking(self.child.job, False)
            poll.register(self.child.job, select.POLLOUT)
        next_check = 0.0
        streaming = False
        while self.done is None and self.child.exit_code is None:
            now = time.monotonic()
            if now >= self._deadline:
                self.timed_out = True
                return
            if now >= self._end_by:
                self.done = self._ending
                break
            wait = min(self._deadline, self._end_by) - now
            if self._memory is not None:
                if now >= next_check:
                    next_check = now + MEMORY_CHECK_SECONDS
                    if self._memory_exceeded(self._memory):
                        return
                wait = min(wait, MEMORY_CHECK_SECONDS)
            if self._out is not None and self._out.waits != streaming:
                streaming = self._out.waits
                poll.register(self._out.fd, select.POLLOUT if streaming else 0)
            self._hear(poll, wait, wakeup, channel)
        self._let_others_end(poll, wakeup, channel)
        if self._memory is not None:
            # What was written last is still there.
            self._memory_exceeded(self._memory)

    def _hear(self, poll: "select.poll", seconds: float, wakeup: int, channel: int) -> None:
        """Take in what there is within the time: of pipes, of the channel, of processes' ends."""
        network = self._network
        for fd, events in poll.poll(seconds * 1000 + 1):
            if self._out is not None and fd == self._out.fd:
                self._out.write()
                if network is not None:
                    network.go_on()
            elif network is not None and network.serves(fd):
                network.serve(fd, events)
            elif fd == self.child.job:
                self._feed()
                if not self._pending:
                    poll.unregister(fd)
            elif fd == channel and network is not None and network.hear(fd):
                continue
            elif fd == channel:
                # The host sends nothing during a run: it has gone, or does not keep to the
                # protocol. Either way nobody waits for an answer.
                self.child.kill_all()
                os._exit(0)
            elif fd == wakeup:
                os.read(wakeup, 4096)
                self.child.reap(os.WNOHANG)
            elif fd in (self.child.report, self.stdout.fd, self.stderr.fd) and not self._take(fd):
                poll.unregister(fd)

    def _let_others_end(self, poll: "select.poll", wakeup: int, channel: int) -> None:
        """Wait for what the program has started, as long as that does something.

        A process whose input was the program's has its end now, and may still write what it got.
        """
        number = last_number()
        if number is not None and number == self._number_before:
            return
        end_by = min(self._deadline, self._end_by, time.monotonic() + END_SECONDS)
        before: "list[tuple[bytes, ...]]" = []
        while (now := time.monotonic()) < end_by:
            if self._memory is not None and self._memory_exceeded(self._memory):
                return
            if self.child.exit_code is not None:
                # An end is heard of at once; what only waits has twice the same to show.
                seen = activity()
                if not seen or (seen == before and all(state in b"SZ" for _, state, *_ in seen)):
                    return
                before = seen
            self._hear(poll, min(IDLE_SECONDS, end_by - now), wakeup, channel)

    def _memory_exceeded(self, memory: Memory) -> bool:
        self._times.look()
        used = memory.in_use(self.limits["memory_bytes"])
        self.memory_peak = max(self.memory_peak, used)
        self.out_of_memory = used > self.limits["memory_bytes"]
        return self.out_of_memory

    def _feed(self) -> None:
        """Write what the pipe has room for, and let go of it."""
        pending = self._pending
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
                if header.get("type") == "output":
                    if self.outputs.add(parts, header) and self._stream is not None:
                        self._stream.send("output", list(parts.items()))
                elif header.get("type") == "advice":
                    self._keep_remarks(header.get("remarks"))
                elif self.done is None:
                    self._end(header, parts)
        except wire.FrameError:
            # What user code writes here in place of the runner is no report; its exit counts.
            # The pipe is still read, or its writer would wait for ever.
            self._reports = None
        return True

    def _end(self, header: "dict[str, object]", parts: "dict[str, bytes]") -> None:
        """Python says `ending` before it releases what the program has, which may take a second."""
        if header.get("type") == "ending" and self._ending is None:
            self._ending, self.done_parts = header, parts
            self._end_by = min(self._deadline, time.monotonic() + END_SECONDS)
        elif header.get("type") == "done":
            self.done, self.done_parts = header, parts or self.done_parts

    def _keep_remarks(self, claimed: object) -> None:
        """The runner says them once, before it starts the program; all later ones are not its."""
        if not self._advised or self.remarks is not None:
            self.remarks_dropped += 1
            return
        self.remarks, dropped = advice.checked(claimed)
        self.remarks_dropped += dropped

    def finish(self) -> None:
        """End what is left of the program and take in the rest of its output and its report."""
        now = last_number()
        if now is not None and self._number_before is not None:
            # Numbers begin anew at the machine's largest: then it is at least so many.
            before = self._number_before
            self.processes_started = now - before if now >= before else now
        self.child.kill_all()
        if self._network is not None:
            self._network.close()
        self.memory_peak = max(self.memory_peak, self.child.memory_peak)
        self.stdout.drain()
        self.stderr.drain()
        os.set_blocking(self.child.report, False)
        try:
            while self.done is None and not (self.timed_out or self.out_of_memory):
                if not self._take(self.child.report):
                    break
        except BlockingIOError:
            return

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the program alone, without what the child spent on warming up.

        A process whose parent ignores its end is waited for by nobody. Where a cgroup counts its
        time the host knows it; elsewhere we have looked now and then.
        """
        return max(0.0, max(self.child.cpu_seconds, self._times.seconds) - self._cpu_before)

    @property
    def exit_code(self) -> "int | None":
        if self.timed_out or self.out_of_memory:
            return None
        if self.done is not None:
            code = self.done.get("exit_code")
            return code & 0xFF if type(code) is int else 1
        return self.child.exit_code


def answer(run: Run, request_id: object, seconds: float) -> bytes:
    """The answer frame of a single run."""
    header, parts = outcome(run, seconds, *artifacts.collect("artifacts", run.limits))
    header["sigsys"] = run.child.sigsys
    header["processes_left"] = run.child.left
    header["processes_started"] = run.processes_started
    return wire.pack({"type": "result", "id": request_id, **header}, parts)


def _exception(run: "Run | Cell") -> "list[tuple[str, bytes]]":
    """What ended it, as the program claims, or its exit code where its language says no more."""
    code = run.exit_code
    if not code:
        return []
    told = run.done_parts.get("exception")
    if told is None and run.language not in ("python", "nodejs"):
        # No runner of ours has seen any.
        told = program.encode_exception("Error", f"exit status {code}", "")
    return [("exception", told)] if told and len(told) <= EXCEPTION_BYTES else []


def outcome(
    run: "Run | Cell",
    seconds: float,
    files: "list[tuple[str, bytes]]",
    skipped: "list[list[str]]",
) -> "tuple[dict[str, object], list[tuple[str, bytes]]]":
    """What came of a run. All in it but verdicts and measurements is the program's own claim."""
    parts = [("stdout", run.stdout.content), ("stderr", run.stderr.content)]
    if "result" in run.done_parts and run.exit_code == 0:
        parts.append(("result", run.done_parts["result"]))
    parts += _exception(run)
    for number, bundle in enumerate(run.outputs.kept):
        parts += [(f"output:{number}:{mime}", content) for mime, content in bundle.items()]
    parts += [(f"artifact:{name}", content) for name, content in files]
    header: "dict[str, object]" = {
        "exit_code": run.exit_code,
        "timed_out": run.timed_out,
        "out_of_memory": run.out_of_memory,
        "stdout_truncated": run.stdout.truncated,
        "stderr_truncated": run.stderr.truncated,
        "order": run.order.entries,
        "order_cut": run.order.is_cut,
        "artifacts_skipped": skipped,
        "outputs_skipped": run.outputs.skipped.entries,
        "remarks": run.remarks,
        "remarks_dropped": run.remarks_dropped,
        "seconds": seconds,
        "cpu_seconds": run.cpu_seconds,
        "memory_peak_bytes": run.memory_peak,
    }
    return header, parts
