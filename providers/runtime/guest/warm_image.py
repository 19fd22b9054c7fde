"""Being what the sandboxes of a template begin from: loaded, and asked for nothing yet.

What an image brings along for /tmp, which is empty at the start of every program otherwise.
"""

import os
import sys

from . import preload, wire


def become(channel_in: int, channel_out: int) -> None:
    """Say what is loaded, and wait. Who goes on from here is one of many that begin with this
    memory, each with a channel of its own."""
    files = b"\0".join(_loaded_files())
    wire.write_all(channel_out, wire.pack({"type": "loaded"}, [("files", files)]))
    if wire.read_frame(channel_in, wire.Parser(0)) is None:
        os._exit(0)
    preload.reseed()


def _loaded_files() -> "list[bytes]":
    """What this memory was read from. Another file in the place of one does not fit it."""
    # Every sandbox loads this module, and few become an image.
    from .mappings import mapped_files

    modules = [getattr(module, "__file__", None) for module in sys.modules.values()]
    return sorted({os.fsencode(name) for name in modules if name} | mapped_files())


# For caches that libraries would otherwise build anew in every sandbox, such as matplotlib's
# list of fonts.
TMP_CONTENT = "/usr/share/cofferdam/tmp"


def _list() -> "tuple[list[str], list[tuple[str, str]]]":
    """The folders to be made in /tmp, outer ones first, and the files: the image's and ours."""
    folders, files = [], []
    for folder, _, names in os.walk(TMP_CONTENT):
        inside = "/tmp" + folder[len(TMP_CONTENT) :]
        folders.append(inside)
        files += [(f"{folder}/{name}", f"{inside}/{name}") for name in names]
    return folders[1:], files


_folders, _files = _list()


def fill_tmp() -> None:
    """Put it there: folders anybody may write to, and links to files nobody can."""
    for folder in _folders:
        os.mkdir(folder)
        os.chmod(folder, 0o777)
    for source, link in _files:
        os.symlink(source, link)


def take_back() -> None:
    """Remove what `fill_tmp` made, as far as it is still there and nothing was added to it."""
    try:
        for _, link in _files:
            os.unlink(link)
        for folder in reversed(_folders):
            os.rmdir(folder)
    except OSError:
        return
