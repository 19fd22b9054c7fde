"""Images of gVisor sandboxes that have loaded their template's modules, and new ones out of them.

To import numpy and pandas takes a fresh sandbox most of its start. So one sandbox of a template
loads them, is written to a folder by `runsc checkpoint` before it was asked for anything, and ends.
All others begin as it was there: they fork the process that runs code themselves, which seeds anew
what is seeded (guest/preload.py). No image ever holds anything of a run.

What was loaded must still be what lies on the disk: gVisor reads pages of programs from there, and
does not notice that an update has put another file in the place of one.

Whatever goes wrong with an image is ours. The sandbox is then started afresh, and the next one
makes another image.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from providers.errors import CreationFailed, RateLimited, SandboxError
from providers.runtime.guest import wire
from providers.runtime.pool.launcher import end_of, hurried_when_late
from providers.runtime.pool.protocol import ChannelClosed
from providers.runtime.pool.template import Template

if TYPE_CHECKING:
    from providers.runtime.launchers.oci import GvisorGuest

logger = logging.getLogger(__name__)

# Imports take their time on a busy machine; a restore is a fifth of them.
LOADING_SECONDS = 30.0
WRITING_SECONDS = 20.0
RESTORING_SECONDS = 10.0

# After so many failures in a row a template is done without for so long.
MOST_FAILURES = 3
REST_SECONDS = 600.0

# Templates whose image is kept: those of former settings have one too.
MOST_IMAGES = 8

# The names of all files that a template's modules were loaded from.
NAMES_BYTES = 4 << 20

# CLOCK_REALTIME_COARSE, by which files have their times. `time` has no name for it.
_COARSE_CLOCK = 5

# All that a restored guest waits for. It says nothing.
_GO = wire.pack({"type": "go"}, [])

_FAILURES = (SandboxError, OSError, ChannelClosed, wire.FrameError, TimeoutError)


# Name of a file, and what is another number once it is another file.
_Files = list[tuple[bytes, tuple[int, ...] | None]]


@dataclass
class _Image:
    """Of one template: where it is, None where there is none, what it was made of, and how it went
    so far."""

    folder: Path | None = None
    files: _Files = field(default_factory=list)
    failures: int = 0
    not_before: float = 0.0
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class WarmImages:
    """Makes sandboxes by images in a folder that is the pool's own. Lives in one event loop."""

    def __init__(
        self,
        folder: Path,
        runsc: str,
        begin: Callable[[Template, Path | None], GvisorGuest],
        root_of: Callable[[Template], str] = lambda _: "",
    ) -> None:
        """`begin` starts a sandbox that is to become an image, or one out of the image given.
        `root_of` is the folder that a template's sandboxes have for their root.

        Raises OSError where the folder cannot be made.
        """
        folder.mkdir(mode=0o700)
        self.restored = 0
        self.failed = 0
        self._folder = folder
        self._runsc = runsc
        self._begin = begin
        self._root_of = root_of
        self._images: dict[Hashable, _Image] = {}
        self._numbers = itertools.count()

    @staticmethod
    def are_for(template: Template) -> bool:
        """Whether a restore is cheaper than a start: without modules to load it hardly is. gVisor
        restores for root alone."""
        loads = template.language == "python" and bool(template.preload)
        return loads and os.geteuid() == 0

    async def start(self, template: Template) -> GvisorGuest | None:
        """A restored sandbox, whose image is made for the first of its template. None where that
        does not work: then one is to be started afresh."""
        image = self._of(template)
        failures, folder = image.failures, None
        try:
            async with image.making:
                if time.monotonic() < image.not_before or failures < image.failures:
                    # By whoever had the lock before.
                    return None
                if image.folder is not None and _have_changed(image.files):
                    shutil.rmtree(image.folder, ignore_errors=True)
                    image.folder = None
                if image.folder is None:
                    image.folder, image.files = await self._make(template)
                folder, files = image.folder, image.files
            guest = await self._restore(template, folder, files)
        except _FAILURES as error:
            if not (isinstance(error, RateLimited) or wire.is_exhaustion(error)):
                self._doubt(image, folder, template, error)
            return None
        self.restored += 1
        image.failures = 0
        return guest

    def _of(self, template: Template) -> _Image:
        key = template, self._root_of(template), _mark(self._runsc)
        image = self._images.pop(key) if key in self._images else _Image()
        # The one asked for last is the last.
        self._images[key] = image
        for each in list(self._images)[:-MOST_IMAGES]:
            if folder := self._images.pop(each).folder:
                shutil.rmtree(folder, ignore_errors=True)
        return image

    async def _make(self, template: Template) -> tuple[Path, _Files]:
        """The folder of a new image, and what it was made of. Raises what is in _FAILURES."""
        before = time.clock_gettime_ns(_COARSE_CLOCK)
        folder = self._folder / str(next(self._numbers))
        guest = self._begin(template, None)
        channel = None
        try:
            channel = await guest.open()
            channel.limit = NAMES_BYTES
            with hurried_when_late(guest):
                async with asyncio.timeout(LOADING_SECONDS):
                    header, parts = await channel.receive()
            if header.get("type") != "loaded" or "files" not in parts:
                raise CreationFailed(str(header.get("reason") or "it did not load its modules"))
            root = self._root_of(template).encode()
            names = [root + name for name in parts["files"].split(b"\0")]
            files = [(name, _mark(name)) for name in names]
            if any(mark is not None and mark[-1] >= before for _, mark in files):
                raise CreationFailed("its programs were changed meanwhile")
            folder.mkdir(mode=0o700)
            await _write(guest, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            if channel is not None:
                # Before its socket is, whose number the next one may get.
                channel.close()
            await guest.destroy()
        return folder, files

    async def _restore(self, template: Template, folder: Path, files: _Files) -> GvisorGuest:
        """One that has gone on from where the image was made. Raises what is in _FAILURES."""
        guest = self._begin(template, folder)
        try:
            channel = await guest.connect()
            await asyncio.get_running_loop().sock_sendall(channel, _GO)
            with hurried_when_late(guest):
                async with asyncio.timeout(RESTORING_SECONDS):
                    await _readable(channel)
            # What it says is heard by whoever uses it.
            if not channel.recv(1, socket.MSG_PEEK):
                raise CreationFailed(guest.complaint() or "it ended")
            if _have_changed(files):
                raise CreationFailed("its programs were changed meanwhile")
        except BaseException:
            await guest.destroy()
            raise
        return guest

    def _doubt(
        self, image: _Image, folder: Path | None, template: Template, error: BaseException
    ) -> None:
        """An image that could not be made, or failed: others that it fails count once."""
        self.failed += 1
        reason = str(error) or type(error).__name__
        logger.warning(
            "a sandbox is started afresh, as its image failed",
            extra={"template": template.name, "reason": reason[:500]},
        )
        if image.folder is not folder:
            return
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        image.folder = None
        image.failures += 1
        if image.failures >= MOST_FAILURES:
            image.not_before = time.monotonic() + REST_SECONDS
            image.failures = 0


async def _write(guest: GvisorGuest, folder: Path) -> None:
    """Have gVisor write a sandbox, which ends it. Raises OSError, TimeoutError."""
    # Uncompressed: what is written once is read for every sandbox.
    options = ("--image-path", str(folder), "--compression=none")
    process = subprocess.Popen(
        [*guest.tool, "checkpoint", *options, guest.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(WRITING_SECONDS):
            await end_of(process)
    finally:
        process.kill()
        code = process.wait()
    if code:
        raise OSError(f"runsc checkpoint ended with exit code {code}")


async def _readable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(channel, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(channel)


def _have_changed(files: _Files) -> bool:
    return any(_mark(name) != mark for name, mark in files)


def _mark(name: bytes | str) -> tuple[int, ...] | None:
    """What changes when another file takes this one's place, the time of its last change at the
    end. None where there is none, as of what only sandboxes see."""
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
