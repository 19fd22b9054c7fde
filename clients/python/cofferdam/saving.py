"""Where a file goes whose name untrusted code has chosen."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def target_in(folder: Path, name: str) -> Path:
    """Raises ValueError for a name that leads out of the folder, by itself or by a link there."""
    parts = PurePosixPath(name).parts
    is_plain = bool(parts) and ".." not in parts and not {"\\", "\0"} & set(name)
    target = folder.joinpath(*parts)
    if not is_plain or not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of {folder}")
    return target
