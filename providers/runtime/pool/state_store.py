"""What the next process of a pool has to know of the sandboxes that outlive this one.

A file for each, which only the pool's user can read, and never what a sandbox was given in its
environment. Times are those of the machine since its boot, which no clock's correction changes.
An engine of several machines keeps a copy, from which a pool on another one restores its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from providers.values import SandboxLimits

logger = logging.getLogger(__name__)

# For how long after its lease a sandbox that outlives its pool may be there: it is busy, or whoever
# ends it has to be started first.
GRACE_SECONDS = 120.0
# The longest that a sandbox may be kept without a word.
LONGEST_LEASE_SECONDS = 24 * 3600.0

_CONTAINER = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True)
class SandboxRecord:
    """One kept sandbox.

    `container` is the engine's name for it and `found` what the launcher knows it again by;
    `template` is its template's name and language. `marker` has its guest listen to a new host.
    `version` is that of its guest's protocol, `seconds` the lease that was granted last, which ends
    at `expires_at`.
    """

    container: str
    ref: str = field(repr=False)
    owner: str
    template: str
    language: str
    runtime: str
    limits: Mapping[str, int]
    interpreter: str
    marker: str = field(repr=False)
    found: Mapping[str, Any]
    version: int
    boot: str
    opened_at: float
    expires_at: float
    seconds: float

    @property
    def left(self) -> float:
        """Seconds until its lease ends: never more than were granted."""
        return min(self.expires_at - now(), self.seconds) if self.boot == boot() else -1e9

    @property
    def is_over(self) -> bool:
        return self.left <= -GRACE_SECONDS

    def to_copy(self) -> str:
        """Return the record as another machine reads it, whose times are by the clock."""
        return json.dumps({**asdict(self), "ends_at": time.time() + self.left})

    @property
    def sandbox_limits(self) -> SandboxLimits:
        return replace(SandboxLimits(), **self.limits)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class StateStore:
    """Of the pool of this name in this data directory. One process at a time has it."""

    def __init__(self, data_dir: Path, pool_id: str, *, has_copies: bool = False) -> None:
        """With `has_copies` the engine keeps a copy of each record."""
        self._folder = data_dir / "kept" / pool_id
        self._lock = -1
        self.has_copies = has_copies
        # Called with each record that is saved.
        self.listeners: set[Callable[[SandboxRecord], None]] = set()
        self._is_restored = not has_copies

    @cached_property
    def home(self) -> str:
        """Tells the containers of this pool from those of another of the same name elsewhere."""
        path, made = self._folder / "home", secrets.token_hex(8)
        draft = self._folder / f"home.{made}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_text(made)
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
            draft.unlink()
            return path.read_text()
        except OSError as error:
            logger.warning("persistent sandboxes will end with this process: %s", error)
            return made

    def take(self) -> bool:
        """Whether this process has it: from now on until it ends, or `let_go`. Raises OSError."""
        if self._lock >= 0:
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return True

    @property
    def is_restored(self) -> bool:
        """Whether all is known here that the pool's processes keep."""
        return self._is_restored

    @property
    def is_ours(self) -> bool:
        return self._lock >= 0

    def let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def all(self) -> list[SandboxRecord]:
        """What is remembered, whatever is left of it. A file that is none of ours is removed."""
        found = []
        for path in self._files():
            remembered = _read(path)
            if remembered is not None:
                found.append(remembered)
            elif self.is_ours:
                logger.warning("removed an invalid file of a persistent sandbox: %s", path.name)
                _remove(path)
        return found

    def of_container(self, container: str) -> SandboxRecord | None:
        """What is remembered of a container."""
        return _read(self._path(container)) if _CONTAINER.fullmatch(container) else None

    def knows(self, ref: str) -> bool:
        """Whether a sandbox of this name may be had again."""
        return not self._is_restored or any(
            each.ref == ref and not each.is_over for each in self.all()
        )

    def save(self, remembered: SandboxRecord) -> None:
        """Raises OSError. A reader sees the former file or this one."""
        path = self._path(remembered.container)
        draft = path.with_suffix(".draft")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(asdict(remembered), stream)
        draft.replace(path)
        for listener in list(self.listeners):
            listener(remembered)

    def restore(self, copies: Iterable[SandboxRecord]) -> None:
        """Remember what the engine has copies of, where this machine knows of no later lease."""
        for copy in copies:
            known = self.of_container(copy.container)
            try:
                if known is None or known.left < copy.left:
                    self.save(copy)
            except OSError as error:
                logger.warning("a persistent sandbox is not remembered: %s", error)
        self._is_restored = True

    def forget(self, container: str) -> None:
        _remove(self._path(container))

    def _path(self, container: str) -> Path:
        return self._folder / f"{container}.json"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []


def _remove(path: Path) -> None:
    """Whoever ends a sandbox ends it all the same: one that is gone is not found again."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the file of a persistent sandbox cannot be removed: %s", error)


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("container", "ref", "owner", "template", "language", "runtime"), str),
    **dict.fromkeys(("interpreter", "marker", "boot"), str),
    **dict.fromkeys(("limits", "found"), dict),
    "version": int,
    **dict.fromkeys(("opened_at", "expires_at", "seconds"), (int, float)),
}


def _read(path: Path) -> SandboxRecord | None:
    """None for a file that is gone, or is no such thing."""
    try:
        remembered = _parse(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return remembered if path.stem == remembered.container else None


def read_copy(copy: str) -> SandboxRecord | None:
    """Return the record of which this is a copy, None for what is no such thing."""
    try:
        told = json.loads(copy)
        left = float(told.pop("ends_at")) - time.time()
        remembered = _parse(told)
        is_lease = math.isfinite(left) and 0 < remembered.seconds <= LONGEST_LEASE_SECONDS
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    # Never more than was granted, whatever the clocks of the two machines say.
    left = min(left, remembered.seconds)
    if not is_lease or not _CONTAINER.fullmatch(remembered.container):
        return None
    return replace(remembered, boot=boot(), expires_at=now() + left, opened_at=now())


def _parse(told: Any) -> SandboxRecord:
    """Raises ValueError or TypeError."""
    if not isinstance(told, dict) or set(told) != set(_KINDS):
        raise ValueError("it lacks fields of a record, or has others")
    if not all(isinstance(told[name], kind) for name, kind in _KINDS.items()):
        raise ValueError("a field is of another type")
    remembered = SandboxRecord(**told)
    bytes.fromhex(remembered.marker)
    remembered.sandbox_limits  # noqa: B018  raises where they are none
    return remembered
