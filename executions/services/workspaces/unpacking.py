"""A tar archive unpacked into the saved files of a session that sleeps: all of it, or nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass

from executions.kernel.paths import MOST_BYTES, is_name
from executions.models.session import Session
from executions.models.workspace import Blob
from executions.services.sessions.errors import tenant_of
from executions.services.workspaces import blobs, quota, tar
from executions.services.workspaces.changing import (
    edited,
    stored,
    while_blobs_are_there,
)
from executions.services.workspaces.edit import Edit
from executions.services.workspaces.tree import parts_of, refuse, refuse_for
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration
from providers.guest.archive import READABLE
from providers.guest.paths import shown

# What is held until it goes up together.
_HELD_FILES, _HELD_BYTES = 64, 16 * 1024 * 1024
_LATEST = 2**33


@dataclass(frozen=True)
class _Unpacked:
    member: tar.Member
    sha256: str


def unpack(session: Session, path: str, content: Iterable[bytes]) -> int:
    """Unpack it below a folder. How many entries it had. Raises changing.IsAwake."""
    folder = parts_of(path, is_named=False)

    def put() -> int:
        unpacked, found = _taken_in(session, content)

        def change(edit: Edit) -> int:
            edit.load_all()
            edit.make(folder, "path")
            for each in unpacked:
                _put(edit, folder, each.member, found.get(each.sha256))
                # Each may bring as many folders as a path can have.
                if edit.files > edit.workspace.files:
                    quota.check_session("", edit.files, 0, edit.names)
            return len(unpacked)

        return edited(session, change)

    return while_blobs_are_there(put)


def _taken_in(
    session: Session, content: Iterable[bytes]
) -> tuple[list[_Unpacked], dict[str, Blob]]:
    """The members, and the blobs of those that are files, by their hash."""
    tenant = tenant_of(session)
    unpacked: list[_Unpacked] = []
    found: dict[str, Blob] = {}
    held: list[blobs.Content] = []
    try:
        for member, body in tar.members(iter(content)):
            # Refused before more goes up: what is too much for a session by itself.
            quota.check_session(session.provider, len(unpacked), member.size)
            if max(len(member.name.rstrip("/")), len(member.target)) > MOST_BYTES:
                refuse("data", f"{shown(member.name)}: A path has {MOST_BYTES} bytes at most.")
            sha256 = ""
            if member.is_file:
                try:
                    taken = blobs.taken_in(body)
                except tar.NoArchive as error:
                    refuse("data", f"{shown(member.name)}: {error.why}")
                held.append(taken)
                sha256 = taken.sha256
                if len(held) >= _HELD_FILES or sum(each.size for each in held) >= _HELD_BYTES:
                    _upload(tenant, held, found)
            unpacked.append(_Unpacked(member, sha256))
        _upload(tenant, held, found)
    except tar.NoArchive as error:
        refuse("data", error.why)
    finally:
        for taken in held:
            taken.stream.close()
    return unpacked, found


def _upload(tenant: Tenant, held: list[blobs.Content], found: dict[str, Blob]) -> None:
    if held:
        found.update(stored(tenant, held, spared={blob.pk for blob in found.values()}))
    for taken in held:
        taken.stream.close()
    held.clear()


def _put(edit: Edit, folder: list[str], member: tar.Member, blob: Blob | None) -> None:
    try:
        parts = parts_of(member.name, "data", is_named=member.type != "directory")
        path = "/".join([*folder, *parts])
        parts_of(path, "data", is_named=False)
        if member.type == "directory":
            edit.make([*folder, *parts], "data")
            if parts:
                mode = member.mode | READABLE
                edit.put(path, "directory", mode=mode, modified=_moment(member))
            return
        edit.make([*folder, *parts[:-1]], "data")
        if member.type == "file" and blob is not None:
            if edit.is_folder(path):
                refuse("data", "Not a regular file (directory).")
            edit.put(path, "file", blob=blob, mode=member.mode, modified=_moment(member))
        elif member.type == "symlink":
            _put_link(edit, path, member)
        elif member.type == "hardlink":
            _put_second(edit, folder, path, member)
        else:
            refuse("data", "Is neither file, folder nor link.")
    except InvalidConfiguration as error:
        refuse("data", f"{shown(member.name)}: {error.message}")


def _moment(member: tar.Member) -> float:
    return member.modified if 0 <= member.modified < _LATEST else 0.0


def _put_link(edit: Edit, path: str, member: tar.Member) -> None:
    if edit.is_folder(path):
        refuse_for(errno.EISDIR, "data")
    if not is_name(member.target) or len(member.target) > MOST_BYTES:
        refuse("data", "Its link target is not valid.")
    edit.put(path, "symlink", mode=0o777, modified=_moment(member), target=member.target)


def _put_second(edit: Edit, folder: list[str], path: str, member: tar.Member) -> None:
    """A second name of a file that stands below the folder already."""
    target = [*folder, *parts_of(member.target, "data")]
    row = edit.at("/".join(target)) if edit.reach(target[:-1], "data") else None
    if row is None:
        refuse_for(errno.ENOENT, "data")
    if row.type != "file":
        refuse("data", "Links to something that is not a regular file.")
    if edit.is_folder(path):
        refuse_for(errno.EISDIR, "data")
    edit.copy(row, path)
