"""Files as clients upload them: as parts of a form, or as a body by itself, packed or not."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO, Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from rest_framework.request import Request

from executions.api.e2b.errors import Refused, invalid
from executions.kernel.bodies import HELD, Held
from executions.tenants.models import ApiKey

_PIECE_BYTES = 256 * 1024
_UNPACKED_BYTES = 1024 * 1024
_METADATA = "HTTP_X_METADATA_"
_MOST_METADATA, _METADATA_BYTES = 32, 4096

# A path as the client wrote it, and the content.
Sent = list[tuple[str, IO[bytes]]]


def sent_in(request: Request, path: str) -> Sent:
    """What is uploaded, each with its path: `path`, or the name that a part has. Raises Refused."""
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
    write = _unpacking_to(kept, partial(_hold, request)) if is_packed else kept.write
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


def _unpacking_to(kept: IO[bytes], hold: Callable[[int], None]) -> Callable[[bytes], object]:
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
