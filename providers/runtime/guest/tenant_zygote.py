"""Makes the runs of a tenant's gVisor kernel: each a copy of this process in namespaces of its own.

A run is process 1 of new pid, mount, ipc, uts and network namespaces, with file systems in memory,
a user and a system call filter of its own. It is the supervisor (supervisor.py), as in any other
sandbox, and forks the child that runs user code. Nothing of any run ever comes to this process, as
its memory is what all of them are copied from.

Over its socket to process 1 (tenant_kernel.py) it is told to start and to end runs, and tells when
nothing of one is left. What it cannot end, or not do for any run, ends the kernel.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import gc
import os
import resource
import select
import socket
import struct
import time

from . import kernel, lanes, preload, root, supervisor, wire
from .child import NO_CORE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_NAMESPACES = kernel.NEW_MOUNT | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_PID | kernel.NEW_NET

# gVisor's own memory cgroups, which count what belongs to the processes of one run.
_GROUPS = "/dev/runs"
_USAGE = "memory.usage_in_bytes"

# The users of runs: gVisor counts processes per user. No number is used twice in a kernel.
_FIRST_UID = 20_000

# The number that a run's socket to process 1 has in it.
_CHANNEL = 3
_PID = struct.Struct("!i")

# How often it is looked whether all processes of a run have ended, and for how long.
_LOOK_MS, _LAST_SECONDS = 5, 3.0


def serve(described: "dict[str, object]", control: socket.socket) -> "NoReturn":
    """Be the zygote. `described` has the `filter` of system calls, in hexadecimal, and what is to
    be `hidden` among the programs."""
    try:
        _Zygote(described, control).serve()
    except BaseException as error:
        control.send(lanes.pack(0, lanes.FAILED, repr(error).encode()[:2000]))
    finally:
        os._exit(70)


class _Zygote:
    def __init__(self, described: "dict[str, object]", control: socket.socket) -> None:
        self._filter = bytes.fromhex(str(described["filter"]))
        self._control = control
        self._pids: "dict[int, int]" = {}
        # Those whose first process has ended: its exit code, and until when others may be left.
        self._ended: "dict[int, tuple[int, float]]" = {}
        self._started = 0
        self._tried: "set[tuple[str, ...]]" = set()
        resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
        os.umask(0o022)
        os.mkdir(_GROUPS)
        kernel.mount("cgroup", _GROUPS, "memory", executable=False)
        # What a process between has forked comes back here.
        kernel.adopt_orphans()
        kernel.close_to_others()
        self._wakeup, wakeup_in = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_in, False)
        _signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        preload.load_cheap()
        gc.freeze()

    def serve(self) -> "NoReturn":
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            for fd, _ in poll.poll(_LOOK_MS if self._ended else None):
                if fd == self._wakeup:
                    os.read(self._wakeup, 4096)
                else:
                    self._hear()
            # Also without a signal: a run's orphans may come here when they have ended already.
            self._reap()
            self._look_for_the_end()

    def _hear(self) -> None:
        message, fds, flags, _ = socket.recv_fds(self._control, lanes.CHUNK, 1)
        if not message:
            os._exit(0)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise lanes.LaneError("a template that is too long")
        for number, kind, content in lanes.Parser().feed(message):
            if kind == lanes.START:
                self._try_to_start(number, content, fds)
            elif number in self._pids:
                os.kill(self._pids[number], _signal.SIGKILL)
        for fd in fds:
            os.close(fd)

    def _try_to_start(self, number: int, content: bytes, fds: "list[int]") -> None:
        try:
            template: "dict[str, object]" = wire.loads(content.decode())  # type: ignore[assignment]
            self._preload(template)
            self._start(number, template, fds[0])
        except (OSError, MemoryError, IndexError) as error:
            # Nothing that one start lacks ends the others from here.
            self._remove_group(number)
            self._tell_the_end(number, None, f"the run was not started: {error!r}")

    def _preload(self, template: "dict[str, object]") -> None:
        """Import here what a template names, once: a copy has it for nothing."""
        modules: "tuple[str, ...]" = tuple(template["preload"])  # type: ignore[arg-type]
        if template["language"] != "python" or not modules or modules in self._tried:
            return
        self._tried.add(modules)
        try:
            preload.load(list(modules))
        except preload.Missing:
            # The run's own supervisor tries again, and can tell the host.
            return
        gc.freeze()

    def _start(self, number: int, template: "dict[str, object]", channel: int) -> None:
        self._started += 1
        template["uid"] = _FIRST_UID + self._started
        os.mkdir(f"{_GROUPS}/{number}")
        if self._tried and len(os.listdir("/proc/self/task")) > 1:
            self._pids[number] = self._start_from_a_fork(number, template, channel)
            return
        pid = kernel.fork_into(_NAMESPACES)
        if pid == 0:
            self._be_run(number, template, channel)
        self._pids[number] = pid

    def _start_from_a_fork(self, number: int, template: "dict[str, object]", channel: int) -> int:
        """The same for libraries such as numpy's, whose threads have to be told of a fork.

        Where they have none, as with one processor, it would be a copy for nothing.
        """
        told, tell = os.pipe()
        try:
            if os.fork() == 0:
                try:
                    kernel.unshare(_NAMESPACES)
                    pid = os.fork()
                    if pid == 0:
                        self._be_run(number, template, channel)
                    os.write(tell, _PID.pack(pid))
                finally:
                    os._exit(0)
            os.close(tell)
            tell = -1
            answer = os.read(told, _PID.size)
        finally:
            os.close(told)
            if tell >= 0:
                os.close(tell)
        if len(answer) != _PID.size:
            raise OSError("the intermediate process has failed")
        found: int = _PID.unpack(answer)[0]
        return found

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for number in [each for each, known in self._pids.items() if known == pid]:
                del self._pids[number]
                code = os.waitstatus_to_exitcode(status)
                self._ended[number] = code, time.monotonic() + _LAST_SECONDS

    def _look_for_the_end(self) -> None:
        """gVisor does not always end all of a namespace with its process 1: 7 of 25 times something
        was left. A group can be removed once nothing is in it."""
        for number, (code, until) in list(self._ended.items()):
            reason = self._remove_group(number)
            if not reason or time.monotonic() > until:
                del self._ended[number]
                self._tell_the_end(number, code, reason)

    def _remove_group(self, number: int) -> str:
        """Why it cannot be: something of the run is left."""
        try:
            os.rmdir(f"{_GROUPS}/{number}")
        except FileNotFoundError:
            return ""
        except OSError:
            left = self._kill_the_rest(number)
            return f"its processes have not ended: {left}"
        return ""

    def _kill_the_rest(self, number: int) -> "list[str]":
        """End what is still in the group, by the numbers that it has here."""
        with open(f"{_GROUPS}/{number}/cgroup.procs") as procs:
            left = procs.read().split()
        for pid in left:
            try:
                if int(pid) > 0:
                    os.kill(int(pid), _signal.SIGKILL)
            except ProcessLookupError:
                continue
        return left

    def _tell_the_end(self, number: int, code: "int | None", reason: str) -> None:
        told = wire.dumps({"code": code, "reason": reason[:2000]}).encode()
        self._control.send(lanes.pack(number, lanes.ENDED, told))

    def _be_run(self, number: int, template: "dict[str, object]", channel: int) -> "NoReturn":
        """Process 1 of the new namespaces: own file systems, fewer rights, then the supervisor."""
        try:
            _write(f"{_GROUPS}/{number}/cgroup.procs", "0")
            usage = os.open(f"{_GROUPS}/{number}/{_USAGE}", os.O_RDONLY)
            os.dup2(channel, 0)
            os.dup2(usage, 1)
            # The sockets to process 1 and whatever else was open. No run ever has another's.
            os.closerange(_CHANNEL, 1 << 16)
            channel = os.dup(0)
            template["usage"] = os.dup(1)
            template["once"] = True
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.close(null)
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            os.setsid()
            _enter(template)
            kernel.keep_capabilities(kernel.OF_A_SUPERVISOR)
            if self._filter:
                kernel.filter_system_calls(self._filter)
            supervisor.supervise(template, channel, channel)
        except BaseException as error:
            os.write(channel, wire.pack_failed_start(error))
        finally:
            os._exit(70)


def _enter(template: "dict[str, object]") -> None:
    """Lay file systems of its own over all that can be written to, or tells of others."""
    uid: int = template["uid"]  # type: ignore[assignment]
    kernel.unmount(_GROUPS)
    kernel.mount("tmpfs", "/run", "size=64k,mode=755")
    for name, text in (("passwd", root.passwd(uid)), ("group", root.group(uid))):
        path = f"/run/{name}"
        _write(path, text)
        kernel.bind(path, f"/etc/{name}", read_only=True)
    kernel.make_read_only("/run")
    size = template["workspace_bytes"]
    for path in (str(template["workspace"]), "/tmp", "/dev/shm"):
        kernel.mount("tmpfs", path, f"size={size},mode=1777")
    root.bind_home(str(template["workspace"]))
    kernel.mount("proc", "/proc", "", executable=False)
    kernel.mount("devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=620", executable=False)


def _write(path: str, text: str) -> None:
    """`open()` would make four more system calls."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, text.encode())
    os.close(fd)
