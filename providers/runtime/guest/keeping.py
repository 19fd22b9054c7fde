"""Makes a warm sandbox one that stays: its rooms, and the loop they share."""

import os

from .commands import Commands
from .contexts import ContextRoom
from .files import Files
from .kept import Loop, Operation
from .memory import Memory
from .process_tree import Child
from .root import HOME
from .scrub import PLACES

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import NoReturn

    from .kept import Header, Room


def keep(
    template: "dict[str, object]",
    child: Child,
    header: "Header",
    wakeup: int,
    channel_in: int,
    channel_out: int,
) -> "NoReturn":
    """Carry out what the host says until it has gone. `header` is that of `keep`."""
    lasting: "dict[str, object] | None" = header.get("lasting")  # type: ignore[assignment]
    if lasting is None:
        loop = Loop(channel_in, channel_out, wakeup)
    else:
        # Only here: most end with their channel.
        from .lasting import LastingLoop

        loop = LastingLoop(channel_in, channel_out, wakeup, lasting)
    template = {**template, "home": _enter_home(header)}
    # Elsewhere than in process 1 of a namespace these places are the machine's.
    places = [os.getcwd(), *PLACES] if os.getpid() == 1 else []
    memory = Memory(places) if template["watch_memory"] else None
    contexts = ContextRoom(loop, template, header, child)
    contexts.when_ready(Operation(loop, int(header["id"]), "keep", None))  # type: ignore[call-overload]
    environment = contexts.environment
    rooms: "list[Room]" = [contexts, Commands(loop, template, environment), Files(loop, template)]
    loop.serve(rooms, memory, int(header["memory_bytes"]))  # type: ignore[call-overload]


def _enter_home(header: "Header") -> str:
    """Be in the workspace by its other name, where programs are to have that for their HOME. The
    name; "" where they are not, or it is none here."""
    environment: "dict[str, str]" = header.get("environment") or {}  # type: ignore[assignment]
    try:
        if environment.get("HOME") != HOME or not os.path.samefile(HOME, "."):
            return ""
        os.chdir(HOME)
    except OSError:
        return ""
    os.environ["PWD"] = HOME
    return HOME
