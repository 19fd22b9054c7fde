"""Files in a bucket of an S3-compatible service. Imported only where STORAGE_URL names one."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.core.files.base import File
from storages.backends.s3 import S3Storage

from executions.kernel.storage import (
    MOST_LINK_SECONDS,
    Entry,
    Pieces,
    checked_key,
    disposition,
    safe_type,
)
from providers.threads import reset_after_fork

# Seconds. Whoever waits for the service holds up one execution, and then does without it.
_CONNECT_SECONDS = 3
_READ_SECONDS = 20
_TRIES = 2
_SILENCE_SECONDS = 1.0
# Of one change, by others who make one too.
_LOST_CHANGES = 20
# What is read is in memory up to here, and beyond in a temporary file.
_IN_MEMORY_BYTES = 1024 * 1024
# Of 10,000 parts at most, each but the last of 5 MiB at least.
_PART_BYTES = 8 * 1024 * 1024


class StorageAway(OSError):
    """The service does not answer, or refuses. Its own words are in the cause."""


class Bucket(S3Storage):  # type: ignore[misc]
    """One kind of files, below a prefix. Nothing in it is public; a link ends."""

    def __init__(
        self,
        addressing_style: str = "auto",
        setting: str = "STORAGE_URL",
        links: str | None = "",
        **options: Any,
    ) -> None:
        """`links` is where clients find the service, "" where we do, and None where they cannot."""
        self.setting = setting
        self._links = links
        config = Config(
            s3={"addressing_style": addressing_style},
            signature_version="s3v4",
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
            # Others than Amazon's do not know the checksums that boto3 would add by itself.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        super().__init__(
            client_config=config,
            transfer_config=TransferConfig(use_threads=False),
            # Names are ours and used once, so none is asked for before it is written.
            file_overwrite=True,
            default_acl=None,
            max_memory_size=_IN_MEMORY_BYTES,
            **options,
        )
        reset_after_fork(self._forget_connections)

    def _forget_connections(self) -> None:
        """Leave the connections to the process that made them."""
        self._connections = threading.local()

    def _open(self, name: str, mode: str = "rb") -> File[Any]:
        """Fetched at once, so that what fails does so here."""
        with self._as_os_errors(name):
            opened: File[Any] = super()._open(name, mode)
            opened.open()
            return opened

    def _save(self, name: str, content: File[Any]) -> str:
        with self._as_os_errors(name):
            saved: str = super()._save(name, content)
            return saved

    def delete(self, name: str) -> None:
        with self._as_os_errors(name):
            super().delete(name)

    def exists(self, name: str) -> bool:
        with self._as_os_errors(name):
            found: bool = super().exists(name)
            return found

    def size(self, name: str) -> int:
        with self._as_os_errors(name):
            found: int = super().size(name)
            return found

    def start(self, name: str, size: int) -> bytes:
        """As `Kept.start`."""
        try:
            with self._as_os_errors(name):
                got = self._client.get_object(
                    Bucket=self.bucket_name, Key=self._key(name), Range=f"bytes=0-{size - 1}"
                )
                read: bytes = got["Body"].read()
                return read
        except _Empty:
            return b""

    def entries(self) -> Iterator[Entry]:
        prefix = self._prefix
        with self._as_os_errors(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket_name, Prefix=prefix
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    name = found["Key"].removeprefix(prefix)
                    yield Entry(name, found["Size"], found["LastModified"].timestamp())

    def read(self, name: str) -> tuple[bytes | None, str]:
        """What a file says, and its version; None and "" without one. Raises OSError."""
        try:
            with self._as_os_errors(name):
                got = self._client.get_object(Bucket=self.bucket_name, Key=self._key(name))
                return got["Body"].read(), got["ETag"]
        except FileNotFoundError:
            return None, ""

    def create(self, name: str, content: bytes) -> bytes:
        """As `Kept.create`."""
        self.change(name, lambda found: content if found is None else None)
        return self.read(name)[0] or b""

    def replace(self, name: str, content: bytes) -> None:
        """As `Kept.replace`."""
        with self._as_os_errors(name):
            self._client.put_object(Bucket=self.bucket_name, Key=self._key(name), Body=content)

    def change(self, name: str, update: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a file by what `update` makes of it; None is no file, and changes nothing.

        Of several at once each sees what the one before wrote; `update` may be called again.
        Needs conditional writes, which Amazon's S3 and MinIO have. Raises OSError.
        """
        for _ in range(_LOST_CHANGES):
            found, version = self.read(name)
            changed = update(found)
            if changed is None or self._replace(name, changed, version):
                return
        raise StorageAway(errno.EBUSY, f"other requests keep changing {name}")

    def rename(self, name: str, target: str) -> bool:
        """Whether there was such a file. Raises OSError, FileExistsError where `target` is one."""
        found, _ = self.read(name)
        if found is None:
            return False
        if not self._replace(target, found, ""):
            raise FileExistsError(errno.EEXIST, "there is such an object already", target)
        self.delete(name)
        return True

    def save_stream(self, name: str, stream: Iterable[bytes]) -> int:
        """As `Kept.save_stream`: one request for a small file, a multipart upload for others."""
        where = {"Bucket": self.bucket_name, "Key": self._key(checked_key(name))}
        parts = _parts(stream)
        part = next(parts, bytearray())
        if len(part) < _PART_BYTES:
            with self._as_os_errors(name):
                self._client.put_object(**where, Body=part)
            return len(part)
        with self._as_os_errors(name):
            upload = {
                **where,
                "UploadId": self._client.create_multipart_upload(**where)["UploadId"],
            }
        size = 0
        done: list[dict[str, Any]] = []
        try:
            while part:
                number = len(done) + 1
                with self._as_os_errors(name, is_begun=True):
                    answer = self._client.upload_part(**upload, PartNumber=number, Body=part)
                done.append({"PartNumber": number, "ETag": answer["ETag"]})
                size += len(part)
                # Before the next one is there, so that two are never held.
                del answer, part
                part = next(parts, bytearray())
            with self._as_os_errors(name, is_begun=True):
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})
        except BaseException:
            # What cannot be aborted now, as the service is away, `discard_unfinished` finds.
            with suppress(OSError), self._as_os_errors(name, is_begun=True):
                self._client.abort_multipart_upload(**upload)
            raise
        return size

    def open_range(self, name: str, offset: int = 0, length: int | None = None) -> Pieces:
        """As `Kept.open_range`."""
        where = {"Bucket": self.bucket_name, "Key": self._key(checked_key(name))}
        if length == 0:
            return Pieces()
        last = "" if length is None else offset + length - 1
        try:
            with self._as_os_errors(name):
                body = self._client.get_object(**where, Range=f"bytes={offset}-{last}")["Body"]
        except _Empty:
            return Pieces()

        def read(size: int) -> bytes:
            with self._as_os_errors(name, is_begun=True):
                piece: bytes = body.read(size)
                return piece

        return Pieces(read, body.close)

    def link(self, name: str, *, expires_in: int, filename: str, mime_type: str) -> str | None:
        """As `Kept.link`. What the answer says of itself is signed with the rest."""
        if not 1 <= expires_in <= MOST_LINK_SECONDS:
            raise ValueError(f"a link lasts 1 to {MOST_LINK_SECONDS} seconds")
        key = self._key(checked_key(name))
        if self._links is None:
            return None
        with self._as_os_errors(name, is_begun=True):
            signed: str = self._signer.generate_presigned_url(
                "get_object",
                Params={
                    "Bucket": self.bucket_name,
                    "Key": key,
                    "ResponseContentDisposition": disposition(filename),
                    "ResponseContentType": safe_type(mime_type),
                    "ResponseCacheControl": "private, no-store",
                },
                ExpiresIn=expires_in,
            )
        return signed

    def discard_unfinished(self, before: float) -> int:
        """As `Kept.discard_unfinished`."""
        found = 0
        with self._as_os_errors(self.location):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket_name, Prefix=self._prefix
            )
            for page in pages:
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"].timestamp() >= before:
                        continue
                    self._client.abort_multipart_upload(
                        Bucket=self.bucket_name, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    found += 1
        return found

    def _replace(self, name: str, content: bytes, version: str) -> bool:
        """False when it is not that version any more; "" is that there is none."""
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        try:
            with self._as_os_errors(name):
                self._client.put_object(
                    Bucket=self.bucket_name, Key=self._key(name), Body=content, **condition
                )
        except _Changed:
            return False
        return True

    @contextmanager
    def _as_os_errors(self, name: str, is_begun: bool = False) -> Iterator[None]:
        """A service that was silent is not asked again for a moment: a page may want many files.

        What is begun goes on: that it was silent to another costs it nothing it has done.
        """
        global _silent_until
        what = f"the storage of {self.setting}"
        if not is_begun and time.monotonic() < _silent_until:
            raise StorageAway(errno.EIO, f"{what} did not answer just now", name)
        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in _NOT_FOUND:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", name) from error
            if code in _CHANGED:
                raise _Changed from error
            if code == "InvalidRange":
                raise _Empty from error
            raise StorageAway(errno.EIO, f"{what} refuses: {code}", name) from error
        except (BotoCoreError, Boto3Error) as error:
            _silent_until = time.monotonic() + _SILENCE_SECONDS
            raise StorageAway(
                errno.EIO, f"{what} does not answer: {type(error).__name__}", name
            ) from error

    def _key(self, name: str) -> str:
        key: str = self._normalize_name(name)
        return key

    @property
    def _prefix(self) -> str:
        return f"{self.location.strip('/')}/".removeprefix("/")

    @cached_property
    def _signer(self) -> Any:
        """It sends nothing: the address is part of what is signed."""
        if not self._links:
            return self._client
        return self._create_session().client(
            "s3",
            region_name=self.region_name,
            endpoint_url=self._links,
            config=self.client_config,
        )

    @property
    def _client(self) -> Any:
        return self.connection.meta.client


class _Empty(Exception):
    """Not even the first byte is there."""


class _Changed(Exception):
    """It is not what the condition says."""


_silent_until = float("-inf")

_NOT_FOUND = {"404", "NoSuchKey", "NotFound"}
_CHANGED = {"409", "412", "PreconditionFailed", "ConditionalRequestConflict"}


def _parts(stream: Iterable[bytes]) -> Iterator[bytearray]:
    """The same bytes in pieces of _PART_BYTES, and a last one of what is left."""
    held = bytearray()
    for piece in stream:
        rest = memoryview(piece)
        while rest:
            taken = rest[: _PART_BYTES - len(held)]
            held += taken
            rest = rest[len(taken) :]
            if len(held) == _PART_BYTES:
                full, held = held, bytearray()
                yield full
                del full
    if held:
        yield held
