"""What an image brings along for /tmp, which is empty at the start of every program otherwise."""

import os

# For caches that libraries would otherwise build anew in every sandbox, such as matplotlib's
# list of fonts.
TMP_CONTENT = "/usr/share/cofferdam/tmp"


def fill_tmp(owner: "int | None") -> None:
    """Copy it there, as `owner`'s where that is not who we are."""
    _copy(TMP_CONTENT, "/tmp", owner)


def _copy(source: str, target: str, owner: "int | None") -> None:
    """Copy the files below `source` that exist; what is not there is no loss."""
    for folder, _, names in os.walk(source):
        inside = target + folder[len(source) :]
        if inside != target:
            os.mkdir(inside)
            _give(inside, owner)
        for name in names:
            with open(f"{folder}/{name}", "rb") as file:
                content = file.read()
            with open(f"{inside}/{name}", "wb") as file:
                file.write(content)
            _give(f"{inside}/{name}", owner)


def _give(path: str, owner: "int | None") -> None:
    if owner is not None:
        os.chown(path, owner, owner)
