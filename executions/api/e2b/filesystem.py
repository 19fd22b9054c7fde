"""`filesystem.Filesystem`: what is in a sandbox's folders, and what changes there."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.api.base import answered_later
from executions.api.e2b import watchers
from executions.api.e2b.base import SandboxView, require_basic_user
from executions.api.e2b.errors import Refused, invalid, no_such_file
from executions.api.e2b.paths import USER, shown, to_named, to_place
from executions.api.e2b.watchers import Told, WatchEvents
from executions.kernel.coroutines import Waits
from executions.sessions import files
from executions.sessions.file_events import watching
from executions.sessions.models import Session
from executions.sessions.requests import MOST_DEPTH, FileListing
from providers.guest.names import escape
from providers.sandbox import FileEntry, below_workspace

_TYPES = {
    "file": ("FILE_TYPE_FILE", stat.S_IFREG),
    "directory": ("FILE_TYPE_DIRECTORY", stat.S_IFDIR),
    "symlink": ("FILE_TYPE_SYMLINK", stat.S_IFLNK),
    "other": ("FILE_TYPE_UNSPECIFIED", 0),
}
# What one answer tells of; a folder of more is listed in parts, by who has them.
_MOST_ENTRIES = 20_000


class FilesystemView(SandboxView):
    operations = {
        "ListDir": "list_files",
        "Remove": "remove_file",
        "Move": "move_file",
        "MakeDir": "make_directory",
    }

    @property
    def asked_for(self) -> str:
        return str(self.kwargs["method"])

    def post(self, request: Request, method: str) -> HttpResponseBase:
        return self._watch(request) if method == "WatchDir" else self._unary(request, method)

    @answered_later
    def _unary(self, request: Request, method: str) -> Waits[HttpResponse]:
        calls = {
            "Stat": self._stat,
            "ListDir": self._list,
            "MakeDir": self._make,
            "Move": self._move,
            "Remove": self._remove,
            "CreateWatcher": self._create_watcher,
            "GetWatcherEvents": self._watcher_events,
            "RemoveWatcher": self._remove_watcher,
        }
        return (yield from self.called("filesystem.Filesystem", method, calls))

    def _stat(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        given = body.get("path", "")
        entry = yield from _entry(session, to_place(given))
        if entry is None:
            raise no_such_file(str(given))
        return {"entry": detail(entry)}

    def _list(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        path = to_place(body.get("path", ""))
        yield from _require_folder(session, path, str(body.get("path", "")))
        depth = body.get("depth") or 1
        if type(depth) is not int or depth < 0:
            raise invalid("depth should be at least 1")
        wanted = FileListing(path=path, depth=min(depth, MOST_DEPTH))
        found, more = yield from files.listing(session, wanted, most=_MOST_ENTRIES)
        if not more:
            return {"entries": [detail(entry) for entry in found]}
        raise invalid(f"path: There are more than {_MOST_ENTRIES} entries. List parts of it.")

    def _make(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        path = to_place(body.get("path", ""))
        is_there = path == "/" or below_workspace(path) == ""
        if is_there or not (yield from files.making_directory(session, path)):
            raise Refused(409, "already_exists", f"directory already exists: {shown(path)}")
        entry = yield from _entry(session, path)
        return {"entry": detail(entry or FileEntry(path, "directory", 0, 0o755))}

    def _move(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        source = to_named(body.get("source", ""), "source")
        target = to_named(body.get("destination", ""), "destination")
        if (yield from _entry(session, source)) is None:
            raise no_such_file(str(body["source"]))
        above = target.rpartition("/")[0]
        if above and below_workspace(above) != "" and (yield from _entry(session, above)) is None:
            yield from files.making_directory(session, above)
        return {"entry": detail((yield from files.moving(session, source, target)))}

    def _remove(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        # What was not there is gone as well.
        yield from files.removing(session, to_named(body.get("path", "")))
        return {}

    def _watch(self, request: Request) -> HttpResponseBase:
        require_basic_user(request)
        session = self.session()
        body = self.first_message()
        path = to_place(body.get("path", ""))
        events = WatchEvents(_told(path, body))

        def work() -> Waits[None]:
            yield from _require_folder(session, path, str(body.get("path", "")))
            watch = yield from watching(session, path)
            yield from events.follow(watch, self.seconds)

        return self.streamed(events, work)

    def _create_watcher(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        path = to_place(body.get("path", ""))
        yield from _require_folder(session, path, str(body.get("path", "")))
        watch = yield from watching(session, path)
        return {"watcherId": watchers.keep(session.pk, watch, _told(path, body))}

    def _watcher_events(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        return {"events": (yield from watchers.events_of(session, body.get("watcherId")))}

    def _remove_watcher(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        watchers.remove(session.pk, body.get("watcherId"))
        return {}
        yield


def _told(path: str, body: Mapping[str, Any]) -> Told:
    """What somebody who watches a folder is told."""
    describe = detail if body.get("includeEntry") is True else None
    return Told(path, body.get("recursive") is True, describe)


def detail(entry: FileEntry) -> dict[str, Any]:
    end = entry.end or entry
    kind, mode = _TYPES[end.type][0], end.mode & 0o7777
    path = shown(entry.path)
    told: dict[str, Any] = {
        "name": path.rpartition("/")[2] or path,
        "type": kind,
        "path": path,
        "size": str(entry.size),
        "mode": mode,
        "permissions": stat.filemode(_TYPES[entry.type][1] | mode),
        "owner": USER,
        "group": USER,
        "modifiedTime": _moment(entry.modified),
    }
    if entry.metadata:
        told["metadata"] = {escape(name): escape(each) for name, each in entry.metadata.items()}
    if entry.type == "symlink":
        told["symlinkTarget"] = shown(entry.end.path) if entry.end else escape(entry.target)
    return told


def _moment(seconds: float) -> str:
    """The guest's clock may say anything."""
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        when = datetime.fromtimestamp(0, UTC)
    return when.isoformat().replace("+00:00", "Z")


def _entry(session: Session, path: str) -> Waits[FileEntry | None]:
    if below_workspace(path) == "":
        return FileEntry(path, "directory", 0, 0o755)
    return (yield from files.entry_of(session, path))


def _require_folder(session: Session, path: str, given: str) -> Waits[None]:
    entry = yield from _entry(session, path)
    if entry is None:
        raise no_such_file(given)
    if (entry.end or entry).type != "directory":
        raise invalid(f"path is not a directory: {given!r}")
