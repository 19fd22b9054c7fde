"""The end of a Python program as its interpreter would bring it about, which stays here.

A child has the modules of the process that it was forked from. An interpreter that ends takes all
of them apart, and so touches every page that the two still share. Here that is done to the
program's own modules: what they hold is released, so that `__del__`, `finally` of generators and
the buffers of open files have their turn.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import gc
import io
import os
import stat
import sys
import weakref

from . import program

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from types import ModuleType

_WRITERS = (io.BufferedWriter, io.BufferedRandom)
_BUFFERS = (io.TextIOWrapper, *_WRITERS)
# The standard streams, and the report.
_OWN = (0, 1, 2, 4)
_MOST_DESCRIPTORS = 4096
# Values that hold no others and do nothing at their end.
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, type(sys), type(len)))
# What the program itself is mostly called in `sys.modules`.
_PROGRAM = ("__main__", "main")
# The program may replace what is in these modules, and its modules may raise on any look at them.
_listdir, _fstat, _get_objects = os.listdir, os.fstat, gc.get_objects
_names_of = vars(type(sys))["__dict__"].__get__


class Ending:
    """The end of one program. Made before it begins: what is loaded then is not its own."""

    def __init__(self) -> None:
        self._former = dict(sys.modules)
        self._is_writing = True

    def is_needed(self) -> bool:
        """Write out what is left in buffers. Whether there may be more to do: not where nothing was
        imported, and all names stand for plain values."""
        try:
            # First: a finaliser may take all the time that there is.
            self._is_writing = flush_files(pipes=True)
            return self._is_writing or any(
                type(value) not in _PLAIN
                for name, module in sys.modules.items()
                if self._former.get(name) is not module
                # The program may have put something else there.
                for value in (_names_of(module) if _is_module(module) else {"": module}).values()
            )
        except BaseException:
            # The program has changed what its end needs: that is no fault of what it did.
            return True

    def release(self) -> None:
        """Release what the program's modules hold, and write out what that leaves in buffers."""
        try:
            self._release()
        except BaseException:
            # The same; what is left is left, as it is when the end is cut.
            return

    def _release(self) -> None:
        _forget_hooks()
        # What only cycles hold may still use the program's names.
        gc.collect()
        modules = self._take_modules()
        gc.collect()
        for reference in reversed(modules):
            module = reference()
            if module is not None:
                _clear(module)
                del module
        if self._is_writing:
            flush_files(pipes=True)

    def _take_modules(self) -> "list[weakref.ref[ModuleType]]":
        """Take the program's own modules out of `sys.modules`."""
        found: "list[weakref.ref[ModuleType]]" = []
        former = self._former.get
        libraries = (f"{sys.prefix}/", f"{sys.base_prefix}/")
        for name in [name for name, each in sys.modules.items() if former(name) is not each]:
            module = sys.modules[name]
            if not _is_module(module):
                continue
            file = _names_of(module).get("__file__")
            # Built in, or a library: they hold little of the program, and are much to take apart.
            is_own = name in _PROGRAM or (isinstance(file, str) and not file.startswith(libraries))
            if is_own:
                found.append(weakref.ref(module))
                del sys.modules[name]
        return found


def run_exit_functions(exit_code: int) -> int:
    """Wait for threads, run exit functions, flush: the first half of an interpreter's end."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (getattr(sys, name, None) for name in ("stdout", "stderr")):
            if stream is not None and not stream.closed:
                stream.flush()
        flush_c()
    except BaseException as error:
        try:
            program.print_traceback(error, __file__)
            sys.stderr.flush()
        except BaseException:
            # Nothing is left to write to; the exit code tells it, as the interpreter's own would.
            return 120
        return exit_code or 120
    return exit_code


def _forget_hooks() -> None:
    """Let go of functions of the program that the interpreter would call, and of its streams."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    sys.settrace(None)
    sys.setprofile(None)
    sys.excepthook, sys.displayhook = sys.__excepthook__, sys.__displayhook__
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, getattr(sys, f"__{name}__", None))
    for number in filter(_has_handler, range(1, _signal.NSIG)):
        _signal.signal(number, _signal.SIG_DFL)


def _has_handler(number: int) -> bool:
    # Of some numbers nothing is known, and some of ours are no functions.
    handler = _signal.getsignal(number)
    return callable(handler) and handler is not _signal.default_int_handler


def _is_module(module: object) -> bool:
    return issubclass(type(module), type(sys))


def _clear(module: "ModuleType") -> None:
    """Take its names from a module that somebody still holds, those with an underscore first."""
    names = _names_of(module)
    for first in (True, False):
        for name in list(names):
            is_first = name.startswith("_") and not name.startswith("__")
            if name != "__builtins__" and is_first is first:
                names[name] = None


def flush_c() -> None:
    """Write out what C code of the program has in its own buffers, as `exit` does.

    Nobody loads code in C that prints without `ctypes`, which numpy has too.
    """
    ctypes = sys.modules.get("ctypes")
    try:
        if ctypes is not None:
            ctypes.CDLL(None).fflush(None)
    except BaseException:
        # The program has changed it.
        return


def flush_files(*, pipes: bool) -> bool:
    """Write out what is left in buffers of files, and of pipes, that are open to write.

    Whether there is any such descriptor. A look through all objects takes tens of ms where many
    modules are loaded, and is left out where there is none.
    """
    try:
        written = {fd for fd in map(int, _listdir("/proc/self/fd")) if _is_written(fd, pipes)}
    except OSError:
        # The program has left no descriptor for the listing.
        written = {fd for fd in range(_MOST_DESCRIPTORS) if _is_written(fd, pipes)}
    if not written:
        return False
    found = [each for each in _get_objects() if issubclass(type(each), _BUFFERS)]
    # What text files write goes into the buffers of others.
    for kinds in (io.TextIOWrapper, _WRITERS):
        for each in found:
            try:
                # A compressed file is changed by each flush.
                buffer = getattr(each, "buffer", None) if kinds is io.TextIOWrapper else each
                if isinstance(each, kinds) and issubclass(type(buffer), _WRITERS):
                    if not each.closed and each.fileno() in written:
                        each.flush()
            except BaseException:
                # It has lost its descriptor, there is no room for what it has, or its class is the
                # program's own, and raises anything.
                continue
    return True


def _is_written(fd: int, pipes: bool) -> bool:
    import fcntl

    try:
        if fd in _OWN or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return False
        mode = _fstat(fd).st_mode
    except OSError:
        # The listing's own.
        return False
    return stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))
