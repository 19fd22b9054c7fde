"""Safe paths for files whose names untrusted code chose."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def target_in(folder: Path, name: str) -> Path:
    """The path of a name in a folder. Raises ValueError if it, or a link, leads out of it."""
    parts = PurePosixPath(name).parts
    is_plain = bool(parts) and ".." not in parts and not {"\\", "\0"} & set(name)
    target = folder.joinpath(*parts)
    if not is_plain or not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of {folder}")
    return target
