"""Standard output and standard error of Python programs, whose text leaves the process at once.

A program may be ended at any moment: by its deadline, for its memory, by a crash, by `os._exit`.
What it has written by then is to be with its caller, also where no newline has come yet.
"""

import builtins
import io
import sys

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any

_print = builtins.print
_write, _flush = io.BufferedWriter.write, io.BufferedWriter.flush


class Unbuffered(io.BufferedWriter):
    """A buffer that keeps nothing back."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        count = _write(self, data)
        _flush(self)
        return count


class Stream(io.TextIOWrapper):
    """A standard stream of ours, as opposed to one that the program has put in its place."""


class Print:
    """The builtin `print`, with one write for each call to a standard stream.

    The interpreter's own writes each value and each separator by itself. Without a buffer that
    would be as many system calls, and the lines of two threads would mix.
    """

    __slots__ = ()
    __doc__ = _print.__doc__
    # As the program sees it, and as `pickle` finds it.
    __module__ = "builtins"
    __name__ = __qualname__ = "print"

    def __call__(
        self,
        *values: object,
        sep: "str | None" = " ",
        end: "str | None" = "\n",
        file: "Any" = None,
        flush: bool = False,
    ) -> None:
        out = sys.stdout if file is None else file
        if type(out) is Stream and type(sep) is str and type(end) is str:
            out.write((str(values[0]) if len(values) == 1 else sep.join(map(str, values))) + end)
            if flush:
                out.flush()
        else:
            _print(*values, sep=sep, end=end, file=out, flush=flush)

    def __repr__(self) -> str:
        return "<built-in function print>"

    def __reduce__(self) -> str:
        return "print"


def open_streams() -> None:
    """Put streams without a buffer in the place of stdout and stderr, and their `print`.

    An interpreter has each standard stream by two names.
    """
    system: "Any" = sys
    system.stdout = system.__stdout__ = _stream(1, system.stdout)
    system.stderr = system.__stderr__ = _stream(2, system.stderr)
    system.__stdin__ = system.stdin
    vars(builtins)["print"] = Print()


def _stream(number: int, former: "Any") -> "Any":
    raw: "Any" = io.FileIO(number, "w", closefd=False)
    raw.name = former.name
    stream: "Any" = Stream(
        Unbuffered(raw),
        former.encoding,
        former.errors,
        newline="\n",
        line_buffering=True,
        write_through=True,
    )
    stream.mode = "w"
    return stream
