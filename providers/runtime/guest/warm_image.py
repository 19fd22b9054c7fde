"""Being what the sandboxes of a template begin from: loaded, and asked for nothing yet."""

import os
import sys

from . import reseed, wire
from .mappings import mapped_files


def become(channel_in: int, channel_out: int) -> None:
    """Say what is loaded, and wait. Who goes on from here is one of many that begin with this
    memory, each with a channel of its own."""
    files = b"\0".join(_loaded_files())
    wire.write_all(channel_out, wire.pack({"type": "loaded"}, [("files", files)]))
    if wire.read_frame(channel_in, wire.Parser(0)) is None:
        os._exit(0)
    reseed.reseed()


def _loaded_files() -> "list[bytes]":
    """What this memory was read from. Another file in the place of one does not fit it."""
    modules = [getattr(module, "__file__", None) for module in sys.modules.values()]
    return sorted({os.fsencode(name) for name in modules if name} | mapped_files())
