"""Process 1 of a tenant's gVisor kernel: passes the frames of all runs between them and the host.

Every run has a socket of its own to its supervisor, and a lane (lanes.py) of the one stream to the
host, on descriptors 0 and 1. What makes the runs is a process apart (tenant_zygote.py), because a
run is a copy of its memory: it never sees a byte of what passes here.

When the stream ends, so does this process, and the kernel with all in it.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import os
import select
import socket
import sys

from . import lanes, tenant_zygote, wire
from .kernel import close_to_others


def main() -> None:
    """Serve until the host is gone. argv[1] is what the zygote needs, as JSON."""
    described: "dict[str, object]" = wire.loads(sys.argv[1])  # type: ignore[assignment]
    to_host, from_host = os.dup(1), os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if not os.path.exists("/proc/sentry-meminfo"):
        # The right to mount is gVisor's own there, and the machine's anywhere else.
        wire.write_all(to_host, lanes.pack(0, lanes.FAILED, b"this kernel is not gVisor"))
        os._exit(70)
    close_to_others()
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for fd in (to_host, from_host):
            os.close(fd)
        control.close()
        tenant_zygote.serve(described, theirs)
    theirs.close()
    # Orphans that come here have nobody else to wait for them.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    Relay(from_host, to_host, control).serve()


class _Lane:
    """The end of one run that is here: its socket, and what is under way in both directions."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end: "socket.socket | None" = end
        self.pending = bytearray()
        self.credit = lanes.WINDOW
        # What the host has sent and this side has not given credit for again.
        self.owed = 0
        self.ending: "bytes | None" = None
        self.heard = 0

    def close(self) -> None:
        if self.end is not None:
            self.end.close()
            self.end = None
        self.pending.clear()


class Relay:
    """Passes bytes on. Whatever the host does against the protocol ends the kernel."""

    def __init__(self, from_host: int, to_host: int, control: socket.socket) -> None:
        self._from_host, self._to_host, self._control = from_host, to_host, control
        self._lanes: "dict[int, _Lane]" = {}
        self._by_fd: "dict[int, int]" = {}
        self._out = bytearray()
        self._parser = lanes.Parser()
        self._poll = select.poll()

    def serve(self) -> None:
        """Never returns."""
        for fd in (self._from_host, self._to_host):
            os.set_blocking(fd, False)
        self._poll.register(self._from_host, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)
        while True:
            for fd, events in self._poll.poll():
                if fd == self._from_host:
                    self._hear_host()
                elif fd == self._control.fileno():
                    self._hear_zygote()
                elif fd in self._by_fd:
                    self._serve_lane(self._by_fd[fd], events)
            self._write_out()

    def _hear_host(self) -> None:
        try:
            data = os.read(self._from_host, lanes.CHUNK)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)
        for number, kind, content in self._parser.feed(data):
            if kind == lanes.START and number not in self._lanes:
                self._start(number, content)
            elif number not in self._lanes:
                # It has ended, which the host has not heard yet.
                continue
            elif kind == lanes.DATA:
                self._take(number, content)
            elif kind == lanes.CREDIT:
                self._lanes[number].credit += lanes.credit(content)
                self._register(number)
            elif kind == lanes.END:
                self._drop_end(number)
                self._control.send(lanes.pack(number, lanes.END))
            else:
                raise lanes.LaneError("the host spoke out of turn")

    def _start(self, number: int, template: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            message = lanes.pack(number, lanes.START, template)
            socket.send_fds(self._control, [message], [theirs.fileno()])
        self._lanes[number] = _Lane(ours)
        self._by_fd[ours.fileno()] = number
        self._register(number)

    def _take(self, number: int, content: bytes) -> None:
        lane = self._lanes[number]
        if lane.end is None:
            return
        lane.owed += len(content)
        if lane.owed > lanes.WINDOW:
            raise lanes.LaneError("the host has sent more than it has credit for")
        lane.pending += content
        self._feed(number)

    def _feed(self, number: int) -> None:
        """Give the run what its socket has room for, and the host credit for that."""
        lane = self._lanes[number]
        try:
            while lane.pending and lane.end is not None:
                del lane.pending[: lane.end.send(lane.pending)]
        except BlockingIOError:
            pass
        except OSError:
            # It has ended, which the zygote tells.
            lane.pending.clear()
        taken = lane.owed - len(lane.pending)
        if taken and (taken >= lanes.WINDOW // 2 or not lane.pending):
            lane.owed -= taken
            self._out += lanes.pack_credit(number, taken)
        self._register(number)

    def _serve_lane(self, number: int, events: int) -> None:
        lane = self._lanes[number]
        if events & select.POLLOUT:
            self._feed(number)
        if lane.end is None or not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return
        if lane.credit == 0:
            return
        try:
            data = lane.end.recv(min(lanes.CHUNK, lane.credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            lane.credit -= len(data)
            self._out += lanes.pack(number, lanes.DATA, data)
            self._register(number)
        else:
            self._drop_end(number)
            self._tell_the_end(number)

    def _hear_zygote(self) -> None:
        data = self._control.recv(lanes.CHUNK)
        if not data:
            os._exit(71)
        for number, kind, content in lanes.Parser().feed(data):
            if kind != lanes.ENDED:
                wire.write_all(self._to_host, bytes(self._out) + data)
                os._exit(70)
            self._lanes[number].ending = content
            self._tell_the_end(number)

    def _tell_the_end(self, number: int) -> None:
        """Once all of it is gone, and the host has all that it said."""
        lane = self._lanes[number]
        if lane.end is None and lane.ending is not None:
            del self._lanes[number]
            self._out += lanes.pack(number, lanes.ENDED, lane.ending)

    def _drop_end(self, number: int) -> None:
        lane = self._lanes[number]
        if lane.end is not None:
            if lane.heard:
                self._poll.unregister(lane.end)
            del self._by_fd[lane.end.fileno()]
            lane.close()

    def _register(self, number: int) -> None:
        """Hear only what can be passed on: the others' runs are not to wait."""
        lane = self._lanes[number]
        if lane.end is None:
            return
        wanted = (select.POLLIN if lane.credit else 0) | (select.POLLOUT if lane.pending else 0)
        if wanted:
            self._poll.register(lane.end, wanted)
        elif lane.heard:
            # Asked for nothing, a socket whose other end has closed would still say so, for ever.
            self._poll.unregister(lane.end)
        lane.heard = wanted

    def _write_out(self) -> None:
        """To the host, as much as it takes. Bounded by the credit that it gave."""
        try:
            while self._out:
                del self._out[: os.write(self._to_host, self._out[: 4 * lanes.CHUNK])]
        except BlockingIOError:
            pass
        self._poll.register(self._to_host, select.POLLOUT if self._out else 0)
