"""The process that does the work on files, with the rights of the program and no others.

The supervisor must neither wait for a file system nor be led astray by one. So it asks this
process, over a socket, with frames as in `protocol`; whatever becomes of it costs the operations
that are under way, and the next one has a new process.

Removes what a worker has left in the workspace that was killed in the middle of its work.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import os
import re
import resource
import select
import stat
import sys
import time

from . import file_operations, file_watch, wire
from .file_operations import TAKE, Event
from .kept import Refused
from .kernel import become, forbid_message_queues
from .notices import Notices, Pause, open_notices
from .paths import MOST_DEPTH, refusal, walk
from .protocol import EVENT_COST

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

    from .file_operations import Steps

MOST_WATCHES = 8
CHANNEL, NOTICES = 3, 4


def be_worker(template: "dict[str, object]", channel: "_socket.socket") -> None:
    """Turn this freshly forked process into the worker. Never returns."""
    code = 71
    try:
        os.setsid()
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        # Nothing of the supervisor's stays open.
        os.dup2(channel.fileno(), CHANNEL)
        if (descriptor := template.get("notices", -1)) != -1:
            os.dup2(descriptor, NOTICES)  # type: ignore[arg-type]
            descriptor = NOTICES
        os.closerange(CHANNEL + 1 if descriptor == -1 else NOTICES + 1, 4096)
        workspace = os.getcwd()
        # What is imported from now on must not be the program's.
        sys.path[:] = [path for path in sys.path if path.startswith("/") and path != workspace]
        if template["uid"] is not None:
            become(template["uid"])  # type: ignore[arg-type]
        for kind, bound in template["bounds"]:  # type: ignore[attr-defined]
            if kind != resource.RLIMIT_NOFILE:
                resource.setrlimit(kind, (bound, bound))
        forbid_message_queues()
        # Not dumpable, as the supervisor is not: no program reads or changes what is in here.
        base = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        found = open_notices() if descriptor == -1 else NOTICES
        _Worker(base, None if found < 0 else Notices(found, base), found).serve()
        code = 0
    finally:
        os._exit(code)


class _Operation:
    """One operation under way: its steps, and what they wait for."""

    def __init__(self, name: str, steps: "Steps", credit: "int | None") -> None:
        self.name = name
        self.steps = steps
        self.credit = credit
        self.event: "Event | None" = None
        self.takes = False
        self.given: "list[bytes | None]" = []
        self.wakes = 0.0
        self.listens: "Notices | None" = None

    def is_ready(self, now: float) -> bool:
        if self.event is not None:
            return self.credit is not None and self.credit >= len(self.event.data) + EVENT_COST
        if self.takes:
            return bool(self.given)
        if self.listens is not None and self.listens.has_some:
            return True
        return self.wakes <= now


class _Worker:
    def __init__(self, base: int, notices: "Notices | None", descriptor: int) -> None:
        self._base, self._notices, self._descriptor = base, notices, descriptor
        self._operations: "dict[int, _Operation]" = {}
        self._parser = wire.Parser(wire.REQUEST_LIMIT)

    def serve(self) -> None:
        """Until the supervisor has gone."""
        poll = select.poll()
        poll.register(CHANNEL, select.POLLIN)
        is_listening = False
        while True:
            if self._is_listening() is not is_listening:
                is_listening = not is_listening
                if is_listening:
                    poll.register(self._descriptor, select.POLLIN)
                else:
                    poll.unregister(self._descriptor)
            if is_listening and self._notices is not None:
                # Before all else: what happened before a call came is told before its answer.
                self._notices.take()
            now = time.monotonic()
            ready = [one for one in self._operations.items() if one[1].is_ready(now)]
            for number, operation in ready:
                self._step(number, operation)
            if CHANNEL in dict(poll.poll(0 if ready else self._wait())):
                data = os.read(CHANNEL, 1 << 18)
                if not data:
                    return
                for header, parts in self._parser.feed(data):
                    self._take(header, parts)

    def _is_listening(self) -> bool:
        """Whether somebody waits for notices. Else they stay in the kernel's queue."""
        return any(each.listens is not None for each in self._operations.values())

    def _wait(self) -> "float | None":
        """Milliseconds until one that sleeps is to go on."""
        now = time.monotonic()
        sleeping = [
            each.wakes for each in self._operations.values() if each.wakes and each.event is None
        ]
        return max(0.0, min(sleeping) - now) * 1000 + 1 if sleeping else None

    def _take(self, header: "dict[str, object]", parts: "dict[str, bytes]") -> None:
        name = header["op"]
        if name == "ping":
            self._say(-1, "pong", {})
            return
        if name == "sweep":
            sweep(self._base)
            return
        number: int = header["id"]  # type: ignore[assignment]
        if name in STEPS:
            self._begin(number, str(name), {**header, "parts": parts, "notices": self._notices})
            return
        operation = self._operations.get(number)
        if operation is None:
            # It has ended while this was on its way.
            return
        if name == "credit":
            operation.credit = (operation.credit or 0) + header["bytes"]  # type: ignore[operator]
        elif name == "data":
            operation.given.append(parts["data"])
        elif name == "end":
            operation.given.append(None)
        elif name == "stop":
            # The supervisor has answered for it.
            self._operations.pop(number)
            self._close(operation)

    def _begin(self, number: int, name: str, header: "dict[str, object]") -> None:
        if name == "file.watch":
            watching = [one for one in self._operations.values() if one.name == name]
            if len(watching) >= MOST_WATCHES:
                failed: "dict[str, object]" = {
                    "reason": f"at most {MOST_WATCHES} watches are allowed",
                    "code": "exhausted",
                }
                self._say(number, "failed", failed)
                return
        steps = STEPS[name](self._base, header)
        self._operations[number] = _Operation(name, steps, header.get("credit"))  # type: ignore[arg-type]

    def _step(self, number: int, operation: _Operation) -> None:
        if operation.event is not None:
            event, operation.event = operation.event, None
            operation.credit -= len(event.data) + EVENT_COST  # type: ignore[operator]
            self._say(number, event.name, event.fields, event.data)
        taken = None
        if operation.takes:
            operation.takes = False
            taken = operation.given.pop(0)
        operation.listens = None
        try:
            wanted = operation.steps.send(taken)
        except StopIteration as stop:
            self._end(number, "done", stop.value)
        except Refused as refused:
            self._fail(number, refused)
        except OSError as error:
            self._fail(number, refusal(error, "path"))
        except MemoryError:
            self._fail(number, Refused("There is not enough memory.", code="exhausted"))
        else:
            if taken is not None:
                self._say(number, "taken", {})
            if isinstance(wanted, Event):
                operation.event = wanted
            elif wanted is TAKE:
                operation.takes = True
            elif isinstance(wanted, Pause):
                operation.listens = wanted.notices
                operation.wakes = time.monotonic() + wanted.seconds
            elif wanted is not None:
                operation.wakes = time.monotonic() + wanted

    def _fail(self, number: int, refused: Refused) -> None:
        said: "dict[str, object]" = {"reason": refused.reason, "code": refused.code}
        if refused.field:
            said["field"] = refused.field
        self._end(number, "failed", said)

    def _end(self, number: int, event: str, fields: "dict[str, object]") -> None:
        del self._operations[number]
        self._say(number, event, fields)

    def _close(self, operation: _Operation) -> None:
        try:
            operation.steps.close()
        except (OSError, Refused):
            # What could not be tidied is the program's doing, and nobody asks any more.
            return

    def _say(self, number: int, event: str, fields: "dict[str, object]", data: bytes = b"") -> None:
        parts = [("data", data)] if data else []
        header = {**fields, "id": number, "event": event}
        for chunk in wire.chunks(header, parts):
            wire.write_all(CHANNEL, chunk)


def _pack(base: int, header: "dict[str, object]") -> "Steps":
    # Slow to import, and few need it.
    from . import archive, chosen_files

    if "only" in header["parts"]:  # type: ignore[operator]
        return chosen_files.pack(base, header)
    return archive.pack(base, header)


def _unpack(base: int, header: "dict[str, object]") -> "Steps":
    from . import archive

    return archive.unpack(base, header)


def _changes(base: int, header: "dict[str, object]") -> "Steps":
    # Few need it.
    from . import file_changes

    return file_changes.changes(base, header)


STEPS = {
    "file.changes": _changes,
    "file.list": file_operations.list_folder,
    "file.stat": file_operations.stat_one,
    "file.mkdir": file_operations.make_folder,
    "file.move": file_operations.move,
    "file.remove": file_operations.remove,
    "file.read": file_operations.read,
    "file.write": file_operations.write,
    "file.watch": file_watch.watch,
    "file.pack": _pack,
    "file.unpack": _unpack,
}


# Nobody is served meanwhile, and a program can make the workspace large.
_SECONDS = 2.0
_OURS = re.compile(r"\.cofferdam-[0-9a-f]{16}")


def sweep(base: int) -> None:
    """To be done before anything else is: there is no other worker, so that nothing of these names
    is in use. What is not found in time stays."""
    until = time.monotonic() + _SECONDS
    try:
        for found in walk(base, MOST_DEPTH):
            if time.monotonic() > until:
                return
            if found is None or found.status is None or not _OURS.fullmatch(found.name):
                continue
            try:
                if stat.S_ISREG(found.status.st_mode):
                    os.unlink(found.name, dir_fd=found.folder)
                elif stat.S_ISDIR(found.status.st_mode):
                    for _ in file_operations.discard(base, found.folder, found.name):
                        if time.monotonic() > until:
                            return
            except (OSError, Refused):
                # The program was quicker, or has put something there that is not to be removed.
                continue
    except (OSError, Refused):
        # What cannot be gone through stays as it is.
        return
