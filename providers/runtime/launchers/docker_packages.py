"""Images with packages of Debian: of another image, and of the files that a template has of them.

The scripts of the packages run as root of a container, and nowhere else: without network, without
a way to more rights, under the pool's runtime, within bounds of memory, processes, disk and time.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from providers.errors import CreationFailed, InvalidConfiguration
from providers.runtime.guest.child import NO_CORE
from providers.runtime.launchers.container_guest import Image
from providers.runtime.launchers.docker_engine import (
    FILES_SECONDS,
    Demultiplexer,
    Engine,
    told_as,
)
from providers.runtime.launchers.docker_owner import Owner, Reaper
from providers.runtime.pool.hardening import Hardening
from providers.templates.base import PACKAGES
from providers.templates.files import pack, pieces
from providers.values import SandboxLimits

_INSTALL_SECONDS = 240.0
# Under gVisor, what is written to grows by a GiB.
_MOST_BYTES = 4 << 30
_MEMORY_BYTES = 1 << 30
_PROCESSES = 256
_OPEN_FILES = 1024
# How often time and room are looked at.
_LOOK_SECONDS = 0.5
_TOLD_BYTES = 600

# What dpkg and scripts of packages need to give files to other users.
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID"]

_FOLDER = "cofferdam-packages"
_INSTALL = f"""\
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 HOME=/root
: > /tmp/begin
dpkg --install /{_FOLDER}/{PACKAGES}/*.deb >&2 </dev/null || exit 1
rm -rf /{_FOLDER}
"""
# gVisor keeps what is written in its root to itself, so that the engine has nothing of it to
# commit. Files that a script removes stay in the image.
_COPY = """\
find . -xdev -cnewer /tmp/begin ! -type s ! -type b ! -type c ! -path . ! -path ./tmp \
  ! -path ./etc/hosts ! -path ./etc/hostname ! -path ./etc/resolv.conf -print0 |
  tar --create --null --no-recursion --files-from=-
"""


class Packages:
    """Those of one pool. `prefix` is how the names of its images begin."""

    runtime, is_gvisor = "runc", False

    def __init__(self, engine: Engine, owner: Owner, reaper: Reaper, prefix: str) -> None:
        self._engine, self._owner, self._reaper = engine, owner, reaper
        self._prefix = prefix

    def add(self, image: Image, digest: str, folder: Path) -> Image:
        """Return the image with the packages of the template in a folder, which has this digest.

        Raises InvalidConfiguration with the end of dpkg's output, and CreationFailed.
        """
        if not (folder / PACKAGES).is_dir():
            return image
        tag = f"{self._prefix}{digest[:24]}-{image.id.rpartition(':')[2][:12]}-{PACKAGES}"
        known = self._engine.image(tag)
        made = known["Id"] if known else self._make(image, folder, tag)
        return replace(image, id=made, packages=made)

    def _make(self, image: Image, folder: Path, tag: str) -> str:
        name, labels = self._reaper.new_name(), self._owner.labels
        api = self._engine.client(FILES_SECONDS)
        try:
            with tempfile.TemporaryFile() as changed, told_as(CreationFailed):
                created = api.create_container(
                    image.id,
                    name=name,
                    entrypoint=["/bin/sh", "-c", _INSTALL + (_COPY if self.is_gvisor else "")],
                    user="0:0",
                    working_dir="/",
                    healthcheck={"test": ["NONE"]},
                    labels=labels,
                    host_config=self._host(),
                )
                identifier: str = created["Id"]
                try:
                    api.put_archive(identifier, "/", _archive(folder))
                    self._install(identifier, changed)
                    if not self.is_gvisor:
                        return self._engine.commit(identifier, labels, tag)
                finally:
                    self._engine.remove(identifier)
                changed.seek(0)
                return self._engine.add_files(image.id, pieces(changed), name, labels, tag)
        finally:
            self._reaper.forget(name)
            api.close()

    def _host(self) -> dict[str, Any]:
        hardening = Hardening.of("gvisor" if self.is_gvisor else "runc")
        limits = SandboxLimits(_MEMORY_BYTES, _MEMORY_BYTES >> 2, _MOST_BYTES, _PROCESSES)
        host = hardening.host(limits, 0)
        bounds = {"nofile": _OPEN_FILES, "fsize": _MOST_BYTES, "core": NO_CORE}
        return {
            **host,
            "Runtime": self.runtime,
            "ReadonlyRootfs": False,
            "CapAdd": _CAPABILITIES,
            "Tmpfs": {"/tmp": f"rw,noexec,nosuid,nodev,mode=1777,size={_MEMORY_BYTES >> 2}"},
            "Ulimits": [
                {"Name": name, "Soft": most, "Hard": most} for name, most in bounds.items()
            ],
        }

    def _install(self, identifier: str, changed: IO[bytes]) -> None:
        """Run it to its end; write what it copies. Raises InvalidConfiguration."""
        stream = self._engine.listen(identifier)
        try:
            self._engine.start_made(identifier)
            told = self._follow(identifier, stream, changed)
        finally:
            stream.close()
        end = self._engine.end_of(identifier)
        if end.exit_code != 0:
            why = "It took more memory than it may. " if end.out_of_memory else ""
            raise _refused(f"{why}{told.decode('utf-8', 'replace').strip()}")

    def _follow(self, identifier: str, stream: socket.socket, changed: IO[bytes]) -> bytes:
        """Return the end of what it says, once it has ended. Raises InvalidConfiguration."""
        deadline, looked_at = time.monotonic() + _INSTALL_SECONDS, time.monotonic()
        frames, told, left = Demultiplexer(), b"", _MOST_BYTES
        stream.settimeout(_LOOK_SECONDS)
        while True:
            try:
                data = stream.recv(1 << 16)
            except TimeoutError:
                data = None
            if data == b"":
                return told
            if data:
                copied = frames.feed(data)
                left -= len(copied)
                changed.write(copied if left >= 0 else b"")
                told = (told + frames.stderr)[-_TOLD_BYTES:]
                frames.stderr = b""
            now = time.monotonic()
            if now > deadline:
                raise _refused(f"It took more than {_INSTALL_SECONDS:g} s.")
            if now - looked_at > _LOOK_SECONDS:
                looked_at = now
                if left < 0 or self._engine.written_bytes(identifier) > _MOST_BYTES:
                    raise _refused(f"It wrote more than {_MOST_BYTES >> 20} MiB.")


def _archive(folder: Path) -> Iterator[bytes]:
    """The packages of a template, and nothing else of it."""
    return pack(folder, f"{_FOLDER}/", lambda path: folder / PACKAGES in path.parents)


def _refused(why: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"template: The packages of Debian cannot be installed. {why}", field="template"
    )
