"""What ended a program, as fields: the type of an exception, its message and its traceback.

It is the program's own claim, as all that comes from the process that runs it. Sizes are bounded
here, and again by whoever reads it.
"""

import sys

from . import wire
from .wire import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS, TYPE_CHARACTERS

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import types

_CUT = "\n[...]\n"


class Ending:
    """Keeps what ended a program, where nothing else hears of it."""

    def __init__(self) -> None:
        self.exception = b""

    def note(self, error: BaseException) -> None:
        """Keep it."""
        self.exception = described(error)

    def show_if_rich(self, value: object) -> None:
        """Nothing: whoever has run the program shows its values."""


def described(error: BaseException) -> bytes:
    """The fields of an exception as JSON: `type`, `message` and `traceback`.

    The traceback has notes, causes and the members of a group. It is empty where the program ended
    itself, by `sys.exit`.
    """
    return fields(_type_of(error), _message_of(error), _traceback_of(error))


def fields(kind: str, message: str, traceback: str) -> bytes:
    """The JSON text of what ended a program, within the bounds."""
    said: "dict[str, object]" = {
        "type": _clean(kind)[:TYPE_CHARACTERS],
        "message": _clean(_shortened(message, MESSAGE_CHARACTERS)),
        "traceback": _clean(_shortened(traceback, TRACEBACK_CHARACTERS)),
    }
    return wire.dumps(said).encode()


def of_status(exit_code: int) -> bytes:
    """The fields of a program whose language has no exceptions."""
    return fields("Error", f"exit status {exit_code}", "")


def own_part(trace: "types.TracebackType | None") -> "types.TracebackType | None":
    """A traceback from the first frame on that is neither ours nor of the event loop we run."""
    loops = getattr(sys.modules.get("asyncio"), "__file__", "")
    # What was sent somewhere as a text has no folder.
    ours, machinery = (
        tuple(file.rpartition("/")[0] + "/" for file in files if "/" in file)
        for files in ((__file__,), (__file__, loops))
    )
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith(machinery):
        own = own.tb_next
    if own is None:
        # Nothing of it is the program's: what is not ours says most.
        own = _without(trace, ours)
    else:
        own.tb_next = _without(own.tb_next, ours)
    return own


def _without(
    trace: "types.TracebackType | None", folders: "tuple[str, ...]"
) -> "types.TracebackType | None":
    """A traceback without the frames of code in these folders."""
    kept: "list[types.TracebackType]" = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(folders):
            kept.append(trace)
        trace = trace.tb_next
    for before, after in zip(kept, [*kept[1:], None]):
        before.tb_next = after
    return kept[0] if kept else None


def _type_of(error: BaseException) -> str:
    return str(type.__dict__["__name__"].__get__(type(error)))


def _message_of(error: BaseException) -> str:
    try:
        # By its type: an exception may have what it likes for a class where it is asked.
        if issubclass(type(error), SyntaxError) and issubclass(type(error.msg), str):  # type: ignore[attr-defined]
            # Where it is belongs to the traceback.
            return error.msg  # type: ignore[attr-defined, no-any-return]
        return str(error)
    except BaseException:
        return "<exception str() failed>"


def _traceback_of(error: BaseException) -> str:
    if issubclass(type(error), SystemExit):
        return ""
    try:
        import traceback

        own = own_part(BaseException.__dict__["__traceback__"].__get__(error))
        return "".join(traceback.format_exception(type(error), error, own))
    except BaseException:
        # Parts of it are the program's own code.
        return ""


def _shortened(text: str, most: int) -> str:
    """The text without its middle where it is too long: the ends say most."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
