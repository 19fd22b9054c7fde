"""The way back to an untouched sandbox between two runs of one tenant, and the proof of it.

What is verified: no process, no file, no shared memory, and a supervisor whose environment, limits
and priority are what they were. Memory the supervisor itself has freed is not wiped, which is one
reason why a sandbox never serves two tenants.
"""

import os

from . import kernel, warm_image
from .processes import kill_others, read_small

# Where a program can write, beside its workspace. All of it is the sandbox's own.
PLACES = ("/tmp", "/dev/shm", "/dev/mqueue")


class Untouched:
    """What the sandbox was like before the first program ran in it."""

    def __init__(self, workspace: str, uid: "int | None") -> None:
        """Look at it now. Only for process 1: elsewhere the places are not the sandbox's own.

        Programs run as `uid` where that is not who we are.
        """
        self._uid = uid
        self._places = [workspace, *(place for place in PLACES if os.path.isdir(place))]
        self._before = self._look()

    def restore(self, program: str) -> str:
        """Go back to it. What could not be undone, in words; empty when nothing is left.

        `program` is the file that was written for the run.
        """
        try:
            if kill_others():
                return "a process is left"
            self._remove_the_usual(program)
            now = self._look()
            if now != self._before:
                for place in self._places:
                    if now[place] != self._before[place]:
                        self._clear(place)
                now = self._look()
        except (OSError, RecursionError) as error:
            return f"{type(error).__name__}: {error}"
        changed = [name for name, value in self._before.items() if now[name] != value]
        return f"changed: {', '.join(changed)}" if changed else ""

    def _remove_the_usual(self, program: str) -> None:
        """What every run leaves, so that mostly there is nothing more to do."""
        warm_image.take_back()
        if self._uid is not None:
            os.seteuid(self._uid)
        try:
            os.unlink(program)
            os.rmdir("artifacts")
        except OSError:
            # Collecting has removed the folder already, or the program has left it otherwise.
            return
        finally:
            if self._uid is not None:
                os.seteuid(0)

    def _clear(self, place: str) -> None:
        mode = self._before[place][0] & 0o7777  # type: ignore[index]
        try:
            _clear(place, mode)
        except PermissionError:
            if self._uid is None:
                raise
            # Root without all of its capabilities, as under gVisor, may not remove what the
            # program made in sticky folders of its own. The program's user may.
            os.seteuid(self._uid)
            try:
                _clear(place, mode)
            except PermissionError:
                # What is our own is left for us.
                os.seteuid(0)
                _clear(place, mode)
            finally:
                os.seteuid(0)

    def _look(self) -> "dict[str, object]":
        # The program may have the supervisor's user, and the kernel lets one process of a user
        # change limits and priority of another.
        seen: "dict[str, object]" = {
            "environment": dict(os.environ),
            "limits": read_small("/proc/self/limits"),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "scheduler": (os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))),
            "input and output": kernel.io_priority() if self._uid is None else 0,
            "shared memory": kernel.shared_objects(),
        }
        for place in self._places:
            status = os.stat(place)
            # gVisor has none, and each call costs much there.
            marks = kernel.file_marks(place) if self._uid is None else 0
            seen[place] = (
                *(status.st_mode, status.st_uid, status.st_gid),
                *(_attributes(place), _names(place), marks),
            )
        return seen


def _names(place: str) -> "list[str] | None":
    try:
        return os.listdir(place)
    except PermissionError:  # the program has closed it
        return None


def _attributes(path: str) -> "list[str]":
    try:
        return sorted(os.listxattr(path))
    except OSError:  # gVisor's file systems have none
        return []


def _clear(place: str, mode: int) -> None:
    if os.stat(place).st_mode & 0o7777 != mode:
        os.chmod(place, mode)
    kernel.clear_file_marks(place)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _empty(folder)
    finally:
        os.close(folder)


def _empty(folder: int) -> None:
    """Remove everything below an open folder, following no link. Raises OSError."""
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            _remove_folder(name, folder)


def _remove_folder(name: str, parent: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent)
        return
    except OSError:  # it is not empty
        if os.stat(name, dir_fd=parent, follow_symlinks=False).st_uid == os.geteuid():
            # Its own maker may have closed it.
            os.chmod(name, 0o700, dir_fd=parent)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        _empty(folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=parent)
