"""What ended a program, as fields: the type of an exception, its message and its traceback.

It is the program's own claim, as all that comes from the process that runs it. Sizes are bounded
here, and again by whoever reads it.
"""

import sys

from . import wire
from .protocol import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS, TYPE_CHARACTERS

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import types

_CUT = "\n[...]\n"


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
    loops = sys.modules.get("asyncio")
    machinery = tuple(
        module.__file__.rpartition("/")[0] + "/"
        for module in (sys.modules[__name__], loops)
        if module is not None and module.__file__
    )
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename.startswith(machinery):
        step = step.tb_next
    # Of what raised outside of the program's own lines there is nothing better to show.
    return step if step is not None else last_foreign(trace)


def last_foreign(trace: "types.TracebackType | None") -> "types.TracebackType | None":
    """What of a traceback is behind the last frame of ours."""
    ours = __file__.rpartition("/")[0] + "/"
    kept = step = trace
    while step is not None:
        if step.tb_frame.f_code.co_filename.startswith(ours):
            kept = step.tb_next
        step = step.tb_next
    return kept


def _type_of(error: BaseException) -> str:
    return str(type.__dict__["__name__"].__get__(type(error)))


def _message_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and isinstance(error.msg, str):
        # Where it is belongs to the traceback.
        return error.msg
    try:
        return str(error)
    except BaseException:
        return "<exception str() failed>"


def _traceback_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return ""
    try:
        import traceback

        own = own_part(error.__traceback__)
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
