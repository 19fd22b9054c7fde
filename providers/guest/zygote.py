"""Process 1 inside bubblewrap: a warm interpreter that forks one sandbox per request.

A run in a sandbox forked here costs 13 ms of CPU in all, one in a bubblewrap and an interpreter
started for it 36 (docs/architecture.md). No user code ever runs in the zygote itself. Each sandbox
leaves every namespace, gets a root of its own (root.py), and loses all privilege before it forks
the child that runs user code.

The host speaks over descriptor 0, a SOCK_SEQPACKET socket. A message is the template as JSON with
two descriptors or more: the sandbox's channel, the seccomp program, and the process lists of its
cgroups. The answer comes on the channel: one byte with a pidfd of the sandbox's first process.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import fcntl
import gc
import os
import resource
import socket
import struct
import sys

from . import kernel, preload, root, supervisor, wire
from .child import NO_CORE

MESSAGE_LIMIT = 64 * 1024
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
    layout = root.Layout(wire.loads(sys.argv[1]))  # type: ignore[arg-type]
    preload.load_common()
    gc.freeze()
    # Sandboxes that ended leave no zombies.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, 4)
        if not message:
            os._exit(0)
        template: "dict[str, object]" = wire.loads(message.decode())  # type: ignore[assignment]
        _preload(template)
        _start(layout, template, control, fds)
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
    """Fork a sandbox's first process into namespaces of its own, and hand it over."""
    namespaces = _NAMESPACES | (kernel.NEW_USER if template["uid"] is None else 0)
    released, release = os.pipe()
    pid = -1
    try:
        if not _tried:
            pid = kernel.fork_into(namespaces)
            if pid == 0:
                control.close()
        else:
            # Libraries such as numpy's have threads, which have to be told of a fork.
            if os.fork() != 0:
                return
            control.close()
            kernel.unshare(namespaces)
            pid = os.fork()
        if pid == 0:
            os.close(release)
            # What the host hears first is who we are.
            os.read(released, 1)
            os.close(released)
            _be_sandbox(layout, template, fds)
        _hand_over(fds[0], pid)
    except Exception as error:
        if pid > 0:
            os.kill(pid, _signal.SIGKILL)
        _report_failure(fds[0], error)
    finally:
        os.close(released)
        os.close(release)
    if _tried:
        os._exit(0)


def _report_failure(channel: int, error: Exception) -> None:
    """Tell the host, unless it has given this sandbox up; the others from here go on."""
    with socket.socket(fileno=os.dup(channel)) as to_host:
        try:
            to_host.sendall(wire.FAILED + repr(error).encode()[:2000])
        except OSError:
            return


def _hand_over(channel: int, pid: int) -> None:
    """Give the host a hold on the sandbox's first process. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        with socket.socket(fileno=os.dup(channel)) as to_host:
            socket.send_fds(to_host, [wire.STARTED], [pidfd])
    finally:
        os.close(pidfd)


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
        root.enter(layout, template, template["uid"])  # type: ignore[arg-type]
        # A process group of its own: a signal to the group would reach every other sandbox.
        os.setsid()
        uid: "int | None" = template["uid"]  # type: ignore[assignment]
        if uid is not None:
            kernel.become(uid)
        kernel.drop_capabilities()
        program = os.read(seccomp, 1 << 16)
        os.close(seccomp)
        if program:
            kernel.filter_system_calls(program)
        template["uid"] = None
        supervisor.supervise(template, channel, channel)
    except BaseException as error:
        reason = f"the sandbox did not start: {error!r}"[:2000]
        os.write(channel, wire.pack({"type": "failed", "reason": reason}, []))
    finally:
        # Whatever happens, this process does not go on as a zygote.
        os._exit(70)
