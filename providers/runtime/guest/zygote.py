"""Process 1 inside bubblewrap: a warm interpreter that forks one sandbox per request.

A run in a sandbox forked here costs 13 ms of CPU in all, one in a bubblewrap and an interpreter
started for it 36 (docs/internals/decisions.md). No user code ever runs in the zygote itself. Each
sandbox leaves every namespace, gets a root of its own (root.py), and loses all privilege before it
forks the child that runs user code.

The host speaks over descriptor 0, a SOCK_SEQPACKET socket. A message is the template as JSON with
two descriptors or more: the sandbox's channel, the seccomp program, and the process lists of its
cgroups. The answer comes on the channel: one byte with a pidfd of the sandbox's first process.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import errno
import fcntl
import gc
import os
import resource
import select
import socket
import struct
import sys

from . import kernel, network, notices, preload, root, supervisor, wire
from .child import NO_CORE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MESSAGE_LIMIT = 64 * 1024
# A channel, the filter of system calls, and the groups to be in.
MOST_FDS = 8
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_NAMESPACES = (
    kernel.NEW_MOUNT
    | kernel.NEW_CGROUP
    | kernel.NEW_UTS
    | kernel.NEW_IPC
    | kernel.NEW_PID
    | kernel.NEW_NET
)


def main() -> None:
    """Serve until the host closes the control socket; then everything in here ends.

    argv[1] describes the root of every sandbox, as `root.Layout` takes it.
    """
    os.umask(0o022)
    # Before the filter, which leaves nobody else this limit to set.
    resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
    described: "dict[str, object]" = wire.loads(sys.argv[1])  # type: ignore[assignment]
    layout = root.Layout(described)
    # What it has now is in every sandbox, and it has privileges that no sandbox has.
    preload.load_common(loads_packages=described["loads_packages"] is True)
    gc.freeze()
    # Sandboxes that ended leave no zombies.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    while True:
        try:
            message, fds, flags, _ = socket.recv_fds(control, MESSAGE_LIMIT, MOST_FDS)
        except (OSError, MemoryError) as error:
            if not wire.is_exhaustion(error):
                raise
            # The message stays where it is.
            select.select([], [], [], 0.01)
            continue
        if not message:
            os._exit(0)
        try:
            if flags & socket.MSG_CTRUNC:
                # Without them all a sandbox would be outside its cgroup, or without its filter.
                raise OSError(errno.EMFILE, "descriptors were lost")
            template: "dict[str, object]" = wire.loads(message.decode())  # type: ignore[assignment]
            _preload(template)
            _start(layout, template, control, fds)
        except Exception as error:
            # Nothing that one start lacks ends the others from here.
            _report_failure(fds, error)
        for fd in fds:
            os.close(fd)


_tried: "set[tuple[str, ...]]" = set()


def _preload(template: "dict[str, object]") -> None:
    """Import here what a template names, once: a fork has it for nothing."""
    modules: "tuple[str, ...]" = tuple(template["preload"])  # type: ignore[arg-type]
    if template["language"] != "python" or not modules or modules in _tried:
        return
    if not _tried:
        # Modules may want to write when they are first imported. No sandbox sees this one.
        kernel.mount("tmpfs", "/tmp", "size=64m,mode=1777")
    _tried.add(modules)
    try:
        preload.load(list(modules))
    except preload.Missing:
        # The sandbox's own supervisor tries again, and can tell the host.
        return
    gc.freeze()


def _start(
    layout: root.Layout,
    template: "dict[str, object]",
    control: socket.socket,
    fds: "list[int]",
) -> None:
    """Fork a sandbox's first process into namespaces of its own, and hand it over.

    Raises what a call that fails raises, in this process alone.
    """
    namespaces = _NAMESPACES | (kernel.NEW_USER if template["uid"] is None else 0)
    released, release = os.pipe()
    try:
        if not _tried:
            pid = kernel.fork_into(namespaces)
            if pid == 0:
                _be_released(layout, template, control, fds, (released, release))
            _hand_over(fds[0], pid)
        # Libraries such as numpy's have threads, which have to be told of a fork.
        elif os.fork() == 0:
            _start_from_a_fork(layout, template, control, fds, (released, release), namespaces)
    finally:
        os.close(released)
        os.close(release)


def _start_from_a_fork(
    layout: root.Layout,
    template: "dict[str, object]",
    control: socket.socket,
    fds: "list[int]",
    gate: "tuple[int, int]",
    namespaces: int,
) -> "NoReturn":
    """What a process between does, whose namespaces are left before it forks."""
    try:
        kernel.unshare(namespaces)
        pid = os.fork()
        if pid == 0:
            _be_released(layout, template, control, fds, gate)
        _hand_over(fds[0], pid)
    except Exception as error:
        _report_failure(fds, error)
    finally:
        os._exit(0)


def _be_released(
    layout: root.Layout,
    template: "dict[str, object]",
    control: socket.socket,
    fds: "list[int]",
    gate: "tuple[int, int]",
) -> "NoReturn":
    """Be the sandbox once the host has heard who we are: that comes first on the channel."""
    try:
        released, release = gate
        control.close()
        os.close(release)
        os.read(released, 1)
        os.close(released)
        _be_sandbox(layout, template, fds)
    finally:
        # Whatever happens, this process does not go on as a zygote.
        os._exit(70)


def _report_failure(fds: "list[int]", error: Exception) -> None:
    """Tell the host, unless it has given this sandbox up, or the channel itself was lost."""
    kind = wire.EXHAUSTED if wire.is_exhaustion(error) else wire.FAILED
    try:
        # A descriptor for a socket may be what is missing.
        os.write(fds[0], kind + repr(error).encode()[:2000])
    except (OSError, IndexError):
        return


def _hand_over(channel: int, pid: int) -> None:
    """Give the host a hold on the sandbox's first process, or end that. Raises OSError."""
    pidfd = -1
    try:
        pidfd = os.pidfd_open(pid)
        with socket.socket(fileno=os.dup(channel)) as to_host:
            socket.send_fds(to_host, [wire.STARTED], [pidfd])
    except BaseException:
        _end(pid)
        raise
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def _end(pid: int) -> None:
    try:
        os.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        return


def _map_users(uid: int, gid: int) -> None:
    """In the user namespace that gives the right to the others we are who we were."""
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def _open_network(watched: bool) -> None:
    """Bring up `lo` in our network namespace: programs may reach servers of their own.

    Where no cgroup counts what TCP holds, a connection of theirs holds little.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    for name in ("tcp_rmem", "tcp_wmem") if watched else ():
        fd = os.open(f"/proc/sys/net/ipv4/{name}", os.O_WRONLY)
        os.write(fd, b"4096 65536 65536")
        os.close(fd)


def _be_sandbox(layout: root.Layout, template: "dict[str, object]", fds: "list[int]") -> None:
    """Process 1 of the sandbox: a root of its own, no privileges, then the supervisor."""
    channel, seccomp, *cgroups = fds
    try:
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        for fd in cgroups:
            os.write(fd, b"0")
            os.close(fd)
        if template["uid"] is None:
            _map_users(layout.uid, layout.gid)
        _open_network(bool(template["watch_memory"]))
        network.offer(channel)
        root.enter(layout, template, template["uid"])  # type: ignore[arg-type]
        # A process group of its own: a signal to the group would reach every other sandbox.
        os.setsid()
        uid: "int | None" = template["uid"]  # type: ignore[assignment]
        if uid is not None:
            kernel.become(uid)
        kernel.drop_capabilities()
        template["notices"] = notices.open_notices()
        program = os.read(seccomp, 1 << 16)
        os.close(seccomp)
        if program:
            kernel.filter_system_calls(program)
        template["uid"] = None
        if template["language"] == "python":
            # Where the zygote has not done it: nothing has a privilege any more.
            preload.load_site()
        supervisor.supervise(template, channel, channel)
    except BaseException as error:
        os.write(channel, wire.pack_failed_start(error))
