"""The files of the E2B API: the file service, watchers, downloads and uploads."""

from __future__ import annotations

import re
import secrets
import stat
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpResponse
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.doors.e2b import credentials
from executions.doors.e2b.connect import (
    USER,
    Refused,
    display_path,
    ensure_user,
    file_error,
    invalid,
    message,
    no_such_file,
    to_item,
    to_place,
)
from executions.doors.e2b.credentials import SANDBOX_HEADER
from executions.doors.e2b.frame import SandboxAuthentication, SandboxView, ensure_basic_user, valid
from executions.doors.e2b.processes import KeptAlive
from executions.doors.native.downloads import ranged_download
from executions.doors.native.frame import deferred
from executions.doors.native.rendering import json_response
from executions.doors.native.session_files import at_most
from executions.kernel.bodies import HELD, Held
from executions.kernel.coroutines import wait_for
from executions.runs.event_log import RunEvent
from executions.runs.event_stream import first_of
from executions.sessions import files
from executions.sessions.control import with_sandbox
from executions.sessions.file_events import Change, Watch, watch_folder
from executions.sessions.models import Session
from executions.sessions.requests import MOST_DEPTH, FileListing
from executions.tenants.models import ApiKey
from providers.errors import SandboxError
from providers.runtime.guest.names import escape
from providers.sandbox import FileEntry, below_workspace
from providers.threads import reset_after_fork
from providers.waiting import within

_EVENT_TYPES = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved": "EVENT_TYPE_RENAME",
    "attributes": "EVENT_TYPE_CHMOD",
}
UNASKED_SECONDS = 300.0
_AT_ONCE_BYTES = 256 * 1024
_ON_ITS_WAY_SECONDS = 0.05


@dataclass(frozen=True)
class Told:
    """What is told of the changes below a folder. `describe` makes of an entry what clients are
    told of it, where they asked for that."""

    folder: str
    is_recursive: bool = False
    describe: Callable[[FileEntry], dict[str, Any]] | None = None

    def events_of(self, entry: RunEvent) -> list[dict[str, Any]]:
        """None for what lies deeper than was asked for. What was moved is gone from where it was,
        and new where it is."""
        said = entry.said or {}
        path, former = str(said.get("path", "")), str(said.get("former", ""))
        kind = _EVENT_TYPES.get(entry.type, "EVENT_TYPE_UNSPECIFIED")
        if former:
            return [*self._event(kind, former), *self._event(_EVENT_TYPES["created"], path, entry)]
        return self._event(kind, path, entry)

    def _event(self, kind: str, path: str, entry: RunEvent | None = None) -> list[dict[str, Any]]:
        name = _from_home(path).removeprefix(f"{_from_home(escape(self.folder))}/").lstrip("/")
        if "/" in name and not self.is_recursive:
            return []
        event: dict[str, Any] = {"name": name, "type": kind}
        if self.describe is not None and isinstance(entry, Change) and entry.entry is not None:
            event["entry"] = self.describe(entry.entry)
        return [event]


def _from_home(path: str) -> str:
    """Of the home's paths the rest. Not every provider tells of the same ones."""
    below = below_workspace(path)
    return path.rstrip("/") if below is None else below


class WatchEvents(KeptAlive):
    keepalive = message({"keepalive": {}})

    def __init__(self, wanted: Told) -> None:
        super().__init__(message({"start": {}}))
        self._wanted = wanted

    def line(self, entry: RunEvent) -> bytes:
        events = self._wanted.events_of(entry)
        return b"".join(message({"filesystem": event}) for event in events)

    async def follow(self, watch: Watch, seconds: float | None) -> None:
        """Raises what ended the watch."""
        self.begin(watch)
        try:
            await wait_for(first_of(watch.ended, self.left, seconds=seconds))
            if not (watch.ended.done() or self.left.done()):
                raise Refused(504, "deadline_exceeded", "The call reached its timeout.")
        finally:
            watch.leave()
            watch.end()
        if watch.ended.done():
            watch.ended.result()
        self.end({})


@dataclass
class _Kept:
    session_id: UUID
    watch: Watch
    wanted: Told


# What the numbers of this process begin with.
_here = secrets.token_hex(4)
_NUMBER = re.compile("[0-9a-f]{32}", re.ASCII)
_lock = threading.Lock()
_kept: dict[str, _Kept] = {}


def _begin_anew() -> None:
    """A forked process gives numbers of its own."""
    global _here
    _here = secrets.token_hex(4)


reset_after_fork(_begin_anew)


def keep(session_id: UUID, watch: Watch, wanted: Told) -> str:
    """The number under which its events are asked for."""
    number = _here + secrets.token_hex(12)
    watch.keep_for(UNASKED_SECONDS)
    with _lock:
        for old in [old for old, each in _kept.items() if each.watch.ended.done()]:
            del _kept[old]
        _kept[number] = _Kept(session_id, watch, wanted)
    return number


async def events_of(session: Session, number: Any) -> list[dict[str, Any]]:
    """What has happened since this was asked for last, up to now. Raises Refused where nobody
    watches, or does no more: an empty answer would say for ever that nothing happens."""
    kept = _find(session.pk, number)
    kept.watch.keep_for(UNASKED_SECONDS)
    if not kept.watch.ended.done():
        await _catch_up(session, kept)
    # In this order: whatever has ended by now has told all that it will.
    has_ended = kept.watch.ended.done()
    entries, _ = kept.watch.read(0, _AT_ONCE_BYTES)
    if has_ended and not entries:
        _forget(number)
        raise Refused(404, "not_found", _end_of(kept.watch))
    return [event for each in entries for event in kept.wanted.events_of(each)]


async def _catch_up(session: Session, kept: _Kept) -> None:
    """Wait until what has happened by now is told. The sandbox tells of it before it answers what
    it is asked now; what it told may still be on its way here for a moment."""
    path = kept.wanted.folder
    try:
        await with_sandbox(
            session, lambda sandbox: sandbox.files.stat(path), lambda _: None, is_use=False
        )
    except SandboxError:
        # The watch itself tells why there is nothing more.
        return
    if not kept.watch.has_some:
        await wait_for(within(_ON_ITS_WAY_SECONDS, kept.watch.next_change(0)))
        # Who comes now and then is no reader that goes on.
        kept.watch.keep_for(UNASKED_SECONDS)


def remove(session_id: UUID, number: Any) -> None:
    """Raises Refused where nobody watches."""
    kept = _find(session_id, number)
    _forget(number)
    kept.watch.leave()


def _forget(number: Any) -> None:
    with _lock:
        _kept.pop(number, None)


def _end_of(watch: Watch) -> str:
    error = watch.ended.exception()
    why = f": {error.message}" if isinstance(error, SandboxError) else "."
    return f"This watcher has ended{why}"


def _find(session_id: UUID, number: Any) -> _Kept:
    with _lock:
        kept = _kept.get(number) if isinstance(number, str) else None
    if kept is not None and kept.session_id == session_id:
        return kept
    if isinstance(number, str) and _NUMBER.fullmatch(number) and not number.startswith(_here):
        raise Refused(
            501,
            "unimplemented",
            "This watcher belongs to another process of the web server, or to one that has ended. "
            "With several processes, watch as a stream: see docs/e2b.md.",
        )
    raise Refused(404, "not_found", "There is no such watcher.")


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

    @deferred
    async def _unary(self, request: Request, method: str) -> HttpResponse:
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
        return await self.answer_call("filesystem.Filesystem", method, calls)

    async def _stat(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        given = body.get("path", "")
        entry = await _entry(session, to_place(given))
        if entry is None:
            raise no_such_file(str(given))
        return {"entry": detail(entry)}

    async def _list(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        path = to_place(body.get("path", ""))
        await _require_folder(session, path, str(body.get("path", "")))
        depth = body.get("depth") or 1
        if type(depth) is not int or depth < 0:
            raise invalid("depth should be at least 1")
        wanted = FileListing(path=path, depth=min(depth, MOST_DEPTH))
        found, more = await files.list_files(session, wanted, most=_MOST_ENTRIES)
        if not more:
            return {"entries": [detail(entry) for entry in found]}
        raise invalid(f"path: There are more than {_MOST_ENTRIES} entries. List parts of it.")

    async def _make(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        path = to_place(body.get("path", ""))
        is_there = path == "/" or below_workspace(path) == ""
        if is_there or not (await files.make_directory(session, path)):
            raise Refused(409, "already_exists", f"directory already exists: {display_path(path)}")
        entry = await _entry(session, path)
        return {"entry": detail(entry or FileEntry(path, "directory", 0, 0o755))}

    async def _move(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        source = to_item(body.get("source", ""), "source")
        target = to_item(body.get("destination", ""), "destination")
        if (await _entry(session, source)) is None:
            raise no_such_file(str(body["source"]))
        above = target.rpartition("/")[0]
        if above and below_workspace(above) != "" and (await _entry(session, above)) is None:
            await files.make_directory(session, above)
        return {"entry": detail(await files.move_file(session, source, target))}

    async def _remove(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        # What was not there is gone as well.
        await files.remove_file(session, to_item(body.get("path", "")))
        return {}

    def _watch(self, request: Request) -> HttpResponseBase:
        ensure_basic_user(request)
        session = self.session()
        body = self.first_message()
        path = to_place(body.get("path", ""))
        events = WatchEvents(_to_watch_options(path, body))

        async def work() -> None:
            await _require_folder(session, path, str(body.get("path", "")))
            watch = await watch_folder(session, path)
            await events.follow(watch, self.seconds)

        return self.stream_answer(events, work)

    async def _create_watcher(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        path = to_place(body.get("path", ""))
        await _require_folder(session, path, str(body.get("path", "")))
        watch = await watch_folder(session, path)
        return {"watcherId": keep(session.pk, watch, _to_watch_options(path, body))}

    async def _watcher_events(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"events": (await events_of(session, body.get("watcherId")))}

    async def _remove_watcher(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        remove(session.pk, body.get("watcherId"))
        return {}


def _to_watch_options(path: str, body: Mapping[str, Any]) -> Told:
    """What somebody who watches a folder is told."""
    describe = detail if body.get("includeEntry") is True else None
    return Told(path, body.get("recursive") is True, describe)


def detail(entry: FileEntry) -> dict[str, Any]:
    end = entry.end or entry
    kind, mode = _TYPES[end.type][0], end.mode & 0o7777
    path = display_path(entry.path)
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
        told["symlinkTarget"] = display_path(entry.end.path) if entry.end else escape(entry.target)
    return told


def _moment(seconds: float) -> str:
    """The guest's clock may say anything."""
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        when = datetime.fromtimestamp(0, UTC)
    return when.isoformat().replace("+00:00", "Z")


async def _entry(session: Session, path: str) -> FileEntry | None:
    if below_workspace(path) == "":
        return FileEntry(path, "directory", 0, 0o755)
    return await files.entry_of(session, path)


async def _require_folder(session: Session, path: str, given: str) -> None:
    entry = await _entry(session, path)
    if entry is None:
        raise no_such_file(given)
    if (entry.end or entry).type != "directory":
        raise invalid(f"path is not a directory: {given!r}")


_PIECE_BYTES = 256 * 1024
_UNPACKED_BYTES = 1024 * 1024
_METADATA = "HTTP_X_METADATA_"
_MOST_METADATA, _METADATA_BYTES = 32, 4096

# A path as the client wrote it, and the content.
Sent = list[tuple[str, IO[bytes]]]


def uploads_in(request: Request, path: str) -> Sent:
    """Return what is uploaded, each with its path: `path`, or the name that a part has. Raises
    Refused."""
    kind = (request.content_type or "").partition(";")[0].strip().lower()
    packing = request.META.get("HTTP_CONTENT_ENCODING", "").strip().lower()
    if packing not in ("", "identity", "gzip"):
        raise Refused(415, "invalid_argument", "Content-Encoding: Must be gzip, or none.")
    if kind == "multipart/form-data" and packing != "gzip":
        return _parts(request, path)
    if not path:
        raise invalid("path: This field is required.")
    return [(path, _whole(request, packing == "gzip"))]


def metadata_in(request: Request) -> dict[str, str]:
    """What is to be put down beside each file, of headers, whose names have no case. Raises
    Refused."""
    found = {
        name.removeprefix(_METADATA).replace("_", "-").lower(): str(value)
        for name, value in request.META.items()
        if name.startswith(_METADATA)
    }
    if len(found) > _MOST_METADATA or sum(map(len, (*found, *found.values()))) > _METADATA_BYTES:
        raise invalid(
            f"metadata: Must be at most {_MOST_METADATA} names, and {_METADATA_BYTES} bytes."
        )
    if not all(name and f"{name}{value}".isascii() for name, value in found.items()):
        raise invalid("metadata: Must be names and values of ASCII.")
    return found


def _hold(request: Request, size: int) -> None:
    """Count what was unpacked for the tenant, until the request ends. Raises RateLimited, and
    ProviderUnavailable."""
    share: Held | None = request.META.get(HELD)
    if share is not None and isinstance(request.auth, ApiKey):
        share.hold_unpacked(request.auth.tenant.slug, size)


def _whole(request: Request, is_packed: bool) -> IO[bytes]:
    kept: IO[bytes] = TemporaryFile()  # noqa: SIM115
    source = request.stream
    write = _unpacker(kept, partial(_hold, request)) if is_packed else kept.write
    try:
        while source is not None and (piece := source.read(_PIECE_BYTES)):
            write(piece)
        if is_packed:
            write(b"")
    except BaseException:
        kept.close()
        raise
    kept.seek(0)
    return kept


def _unpacker(kept: IO[bytes], hold: Callable[[int], None]) -> Callable[[bytes], object]:
    """What unpacks piece after piece into a file; an empty one says that there are no more. `hold`
    is told how much it has become, before it is kept."""
    unpacker = zlib.decompressobj(wbits=31)
    most = settings.SANDBOX_MAX_BODY_BYTES

    def write(piece: bytes) -> None:
        if not piece and not unpacker.eof:
            raise invalid("body: The gzip data is incomplete or invalid.")
        while piece:
            try:
                unpacked = unpacker.decompress(piece, _UNPACKED_BYTES)
            except zlib.error:
                raise invalid("body: Is not gzip data.") from None
            hold(len(unpacked))
            kept.write(unpacked)
            if kept.tell() > most:
                raise Refused(413, "resource_exhausted", f"Must be at most {most} bytes unpacked.")
            if unpacker.unused_data:
                # What would be left out must not be taken for written.
                raise invalid("body: Has data after the end of the gzip data.")
            piece = unpacker.unconsumed_tail

    return write


# Every byte is a character of it, and so nothing of a part is lost that came as a text.
_BYTES = "latin-1"


class _Parts(MultiPartParser):
    """Names of files are whole paths here."""

    def sanitize_file_name(self, file_name: str) -> str:
        return file_name.encode(_BYTES).decode("utf-8", "replace")


class _Keeper(FileUploadHandler):
    def __init__(self) -> None:
        super().__init__()
        self.found: Sent = []

    def new_file(self, *given: Any, **also: Any) -> None:
        super().new_file(*given, **also)
        kept: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self.found.append((self.file_name or "", kept))

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self.found[-1][1].write(raw_data)

    def file_complete(self, file_size: int) -> None:
        self.found[-1][1].seek(0)


def _parts(request: Request, path: str) -> Sent:
    keeper = _Keeper()
    source = request.stream
    if source is None:
        raise invalid("body: Send a file.")
    try:
        texts, _ = _Parts(request.META, source, [keeper], _BYTES).parse()
    except RequestDataTooBig:
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        told = f"file: Must be at most {most} bytes if the part has no file name."
        raise Refused(413, "resource_exhausted", told) from None
    except (MultiPartParserError, SuspiciousOperation) as error:
        raise invalid(f"body: Is not a valid form: {error}") from None
    # A text has no file name: the link says where it goes.
    nameless = [BytesIO(text.encode(_BYTES)) for text in texts.getlist("file")]
    sent: Sent = [*keeper.found, *(("", content) for content in nameless)]
    if not sent:
        raise invalid("body: Send a file.")
    if path and len(sent) > 1:
        raise invalid("path: Must be empty for several files, which have their own paths.")
    if nameless and not path:
        raise invalid("path: Is required for a part without a file name.")
    return [(path or name, content) for name, content in sent]


class TokenOrSignature(SandboxAuthentication):
    def authenticate(self, request: Request) -> tuple[None, ApiKey]:
        query = request.query_params
        if credentials.token_in(request.META) or "signature" not in query:
            return super().authenticate(request)
        operation = "read" if request.method in ("GET", "HEAD") else "write"
        named = str(request.META.get(SANDBOX_HEADER, ""))
        key, sandbox_id = credentials.holder_of_signature(query.dict(), operation, named)
        if key is None:
            # In E2B's words, which programs look for.
            is_late = credentials.has_expired(query.dict())
            told = "signature is already expired" if is_late else "invalid signature"
            raise Refused(401, "unauthenticated", told)
        # The link names no sandbox: what it was signed with does.
        request.META[SANDBOX_HEADER] = sandbox_id
        return None, valid(key, request)


class FilesView(SandboxView):
    authentication_classes = (TokenOrSignature,)
    operations = {"GET": "read_file", "POST": "write_file"}

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return file_error

    @deferred
    async def get(self, request: Request) -> HttpResponseBase:
        session = self.session()
        ensure_user(request.query_params.get("username"))
        given = request.query_params.get("path", "")
        path = to_item(given)
        entry = await files.entry_of(session, path)
        if entry is None:
            raise no_such_file(given)
        if (kind := (entry.end or entry).type) != "file":
            raise invalid(
                f"path: {display_path(path)!r} is not a regular file, but of type {kind}."
            )
        entry = await files.ensure_readable(session, path, entry)
        # It may grow while it is read: no more is sent than was announced.
        return ranged_download(
            request.META.get("HTTP_RANGE", ""),
            entry.size,
            lambda start, length: at_most(files.read(session, path, start, length), length),
            path,
        )

    @deferred
    async def post(self, request: Request) -> HttpResponse:
        session = self.session()
        ensure_user(request.query_params.get("username"))
        with ExitStack() as held:
            metadata = metadata_in(request)
            sent: Sent = uploads_in(request, request.query_params.get("path", ""))
            for _, content in sent:
                held.enter_context(content)
            wanted = [(to_item(path), content) for path, content in sent]
            written = []
            for path, content in wanted:
                body = files.Rereadable(content)
                await files.write_file(session, path, body, metadata=metadata)
                name = display_path(path)
                told = {"path": name, "name": name.rpartition("/")[2], "type": "file"}
                written.append({**told, "metadata": metadata} if metadata else told)
        return json_response(written)
