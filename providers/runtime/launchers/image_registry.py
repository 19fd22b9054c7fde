"""A registry of images, over the distribution API of the Open Container Initiative.

A registry is believed nothing: digests, sizes and media types are compared, every answer is
bounded, a credential goes to its own registry alone, and addresses follow `providers.addresses`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from providers.addresses import Rules, literal, rules
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError

logger = logging.getLogger(__name__)

REGISTRY, CREDENTIAL = "kubernetes_registry", "kubernetes_registry_credential"

# Of a call whose answer is a document, and of one that carries a layer.
CALL_SECONDS, BLOB_SECONDS, SILENCE_SECONDS = 30.0, 900.0, 30.0
# Of manifests, as the specification has it; of configurations; of tokens and errors.
_MANIFEST_BYTES, _CONFIG_BYTES, _ANSWER_BYTES = 4 << 20, 8 << 20, 1 << 20
MOST_BLOB_BYTES = 8 << 30
# What kernels can lay over one another.
MOST_LAYERS = 120
_PIECE_BYTES = 1 << 20
_REDIRECTS, _MOST_REDIRECTS = (301, 302, 303, 307, 308), 3

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONFIGS = {
    OCI_MANIFEST: "application/vnd.oci.image.config.v1+json",
    DOCKER_MANIFEST: "application/vnd.docker.container.image.v1+json",
}
LAYERS = {
    OCI_MANIFEST: "application/vnd.oci.image.layer.v1.tar+gzip",
    DOCKER_MANIFEST: "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
_KNOWN_LAYERS = frozenset(
    {
        *LAYERS.values(),
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.v1.tar+zstd",
        "application/vnd.docker.image.rootfs.diff.tar",
    }
)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_CODE = re.compile(r"[A-Z_]{1,40}")
_PARAMETER = re.compile(r'([a-z]+)="([^"]*)"')
# Docker's own registry has another name for its clients, and official images have a folder.
_HUB, _HUB_API, _OFFICIAL = "docker.io", "registry-1.docker.io", "library"


@dataclass(frozen=True)
class Repository:
    """A repository: the address of its registry, the host as nodes name it, and its name there."""

    origin: str
    host: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Read registry.example/name or http://host:port/name. Raises InvalidConfiguration."""
        scheme, separator, place = text.strip().rpartition("://")
        host, _, name = place.rstrip("/").partition("/")
        if (separator and scheme not in ("https", "http")) or not name or not _NAME.fullmatch(name):
            raise _refused(
                f"{text[:200]!r} is not a repository of images. Name one, such as "
                "registry.example/cofferdam-templates."
            )
        origin = f"{scheme or 'https'}://{_HUB_API if host == _HUB else host}"
        try:
            rules().check_url(origin)
        except ValueError as error:
            raise _refused(f"{host[:200]}: {error}") from None
        return cls(origin, host, name)

    def image(self, digest: str) -> str:
        """Return the image of a digest as nodes pull it."""
        return f"{self.host}/{self.name}@{digest}"

    def url(self, *parts: str) -> str:
        """Return the address of something of the repository's."""
        return "/".join((f"{self.origin}/v2/{self.name}", *parts))

    def scope(self, actions: str) -> str:
        """Return what a token is to allow."""
        return f"repository:{self.name}:{actions}"


@dataclass(frozen=True)
class Reference:
    """An image of a repository, by its tag or digest."""

    repository: Repository
    reference: str

    @classmethod
    def parse(cls, image: str, like: Repository) -> Reference:
        """Read the name of an image as nodes have it. Raises InvalidConfiguration.

        A registry that `like` names is asked as that one is. Of others only those that may be
        asked over plain http are.
        """
        name, _, digest = image.partition("@")
        path, colon, tag = name.rpartition(":")
        if not colon or "/" in tag:
            path, tag = name, "latest"
        host, slash, rest = path.partition("/")
        if not slash or not (host == "localhost" or "." in host or ":" in host):
            host, rest = _HUB, path if slash else f"{_OFFICIAL}/{path}"
        reference = digest or tag
        if not _NAME.fullmatch(rest) or not (
            _DIGEST.fullmatch(digest) if digest else _TAG.fullmatch(tag)
        ):
            raise InvalidConfiguration(
                f"template: {image[:200]!r} is not the name of an image.", field="template"
            )
        if host == like.host:
            return cls(Repository(like.origin, host, rest), reference)
        plain = f"http://{host}"
        try:
            rules().check_url(plain)
            return cls(Repository(plain, host, rest), reference)
        except ValueError:
            return cls(Repository.parse(f"{host}/{rest}"), reference)


@dataclass(frozen=True)
class Descriptor:
    """What a manifest says of a blob."""

    media_type: str
    digest: str
    size: int

    @classmethod
    def parse(cls, document: Any) -> Descriptor:
        """Raises ValueError."""
        if not isinstance(document, dict):
            raise ValueError("a descriptor is no object")
        kind, digest, size = (document.get(name) for name in ("mediaType", "digest", "size"))
        if not isinstance(kind, str) or not isinstance(digest, str):
            raise ValueError("a descriptor has no media type or digest")
        if not _DIGEST.fullmatch(digest):
            raise ValueError("a digest is no sha256")
        if type(size) is not int or not 0 <= size <= MOST_BLOB_BYTES:
            raise ValueError(f"a blob has no size of at most {MOST_BLOB_BYTES >> 30} GiB")
        return cls(kind, digest, size)

    def to_json(self) -> dict[str, Any]:
        """Return it as manifests have it."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True)
class Manifest:
    """The manifest of an image for one platform, and where it is."""

    repository: Repository
    digest: str
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


class Missing(InvalidConfiguration):
    """The registry has no such image."""


class ImageRegistry:
    """A client of one repository to write to, and of others to read from. For one event loop.

    `folder` has the files that are copied meanwhile. `credential` is `user:password` of an account
    of the repository's registry.
    """

    def __init__(self, repository: str, credential: str, folder: Path) -> None:
        """Raises InvalidConfiguration naming the setting."""
        self.repository = Repository.parse(repository)
        if credential and (":" not in credential or not credential.isprintable()):
            raise InvalidConfiguration(
                f"{CREDENTIAL}: Must be a user and a password, as user:password.", field=CREDENTIAL
            )
        self._basic = base64.b64encode(credential.encode()).decode() if credential else ""
        self._folder = folder
        # By origin and scopes.
        self._authorizations: dict[tuple[str, str], str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def resolve(self, image: Reference, architecture: str) -> Manifest:
        """Return the manifest of an image for linux and an architecture, such as amd64.

        Raises Missing where there is none, and SandboxError.
        """
        media_type, digest, document = await self._manifest(image)
        if media_type in _INDEXES:
            digest = _platform(image, document, architecture)
            single = Reference(image.repository, digest)
            media_type, digest, document = await self._manifest(single)
        if media_type not in _CONFIGS:
            raise _lies(image.repository, f"{image.reference} is an index of indexes")
        try:
            config = Descriptor.parse(document.get("config"))
            listed = document.get("layers")
            if not isinstance(listed, list) or not 0 < len(listed) < MOST_LAYERS:
                raise ValueError(f"it has no layers, or more than {MOST_LAYERS}")
            layers = tuple(map(Descriptor.parse, listed))
            if config.media_type != _CONFIGS[media_type] or config.size > _CONFIG_BYTES:
                raise ValueError("it has no configuration of an image")
            if foreign := {each.media_type for each in layers} - _KNOWN_LAYERS:
                raise ValueError(f"layers of the kind {min(foreign)[:80]!r} cannot be copied")
        except ValueError as error:
            raise _lies(image.repository, f"of {image.reference}: {error}") from None
        return Manifest(image.repository, digest, media_type, config, layers)

    async def read_config(self, manifest: Manifest) -> dict[str, Any]:
        """Return the configuration of an image. Raises SandboxError."""
        content = bytearray()

        async def take(piece: bytes) -> None:
            content.extend(piece)

        await self._read_blob(manifest.repository, manifest.config, take)
        found = _document(manifest.repository, bytes(content))
        known = (found.get("rootfs") or {}) if isinstance(found.get("rootfs"), dict) else {}
        diff_ids = known.get("diff_ids")
        if (
            not isinstance(diff_ids, list)
            or len(diff_ids) != len(manifest.layers)
            or not all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in diff_ids)
            or not isinstance(found.get("config") or {}, dict)
            or not isinstance(found.get("history") or [], list)
        ):
            raise _lies(manifest.repository, "the configuration of an image is not that of it")
        return found

    async def copy_blob(self, source: Repository, blob: Descriptor) -> None:
        """Have the repository have a blob of another one. Raises SandboxError."""
        if source == self.repository or await self._has(blob):
            return
        where = await self._begin(blob, source if source.origin == self.repository.origin else None)
        if not where:
            return
        with tempfile.TemporaryFile(dir=self._folder) as file:

            async def take(piece: bytes) -> None:
                await asyncio.to_thread(file.write, piece)

            await self._read_blob(source, blob, take)
            await self._upload(where, blob, file)

    async def put_blob(self, blob: Descriptor, file: IO[bytes]) -> None:
        """Upload the content of a file, unless the repository has it. Raises SandboxError."""
        if not await self._has(blob) and (where := await self._begin(blob)):
            await self._upload(where, blob, file)

    async def put_manifest(self, tag: str, media_type: str, content: bytes) -> str:
        """Give a manifest a tag; return its digest. Raises SandboxError."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        async with self._call(
            "PUT",
            self.repository,
            self.repository.url("manifests", tag),
            headers={"Content-Type": media_type},
            body=lambda: _bytes(content),
            size=len(content),
        ) as answer:
            await self._require(answer, self.repository, "push an image", 201)
            if answer.headers.get("Docker-Content-Digest", digest) != digest:
                raise _lies(self.repository, "it has stored another manifest")
        return digest

    async def delete_manifest(self, digest: str) -> bool:
        """Delete an image. Returns False where the registry allows no deletion. Raises
        SandboxError."""
        url = self.repository.url("manifests", digest)
        async with self._call("DELETE", self.repository, url, actions="pull,delete") as answer:
            if answer.status in (400, 401, 403, 405, 501):
                return False
            await self._require(answer, self.repository, "delete an image", 200, 202, 204, 404)
            return True

    async def _manifest(self, image: Reference) -> tuple[str, str, dict[str, Any]]:
        """Return media type, digest and document of a manifest or an index. Raises SandboxError."""
        repository, reference = image.repository, image.reference
        async with self._call(
            "GET",
            repository,
            repository.url("manifests", reference),
            headers={"Accept": ", ".join((*_CONFIGS, *_INDEXES))},
        ) as answer:
            if answer.status == 404:
                raise Missing(
                    f"template: {repository.host}/{repository.name} has no image "
                    f"{reference[:80]}. Push it there, or name another image in the provider's "
                    "configuration.",
                    field="template",
                )
            await self._require(answer, repository, "read an image", 200)
            content = await _read(answer, repository, _MANIFEST_BYTES)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if _DIGEST.fullmatch(reference) and digest != reference:
            raise _lies(repository, f"{reference} has another digest")
        document = _document(repository, content)
        if media_type not in (*_CONFIGS, *_INDEXES) or document.get("schemaVersion") != 2:
            raise _lies(repository, f"{reference} is {media_type[:80]!r}, and no image")
        if document.get("mediaType", media_type) != media_type:
            raise _lies(repository, f"{reference} has two media types")
        return media_type, digest, document

    async def _read_blob(
        self, source: Repository, blob: Descriptor, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Give `take` the content of a blob in pieces. Raises SandboxError, at the latest after
        the last one, where it is another content."""
        url, digest, left = source.url("blobs", blob.digest), hashlib.sha256(), blob.size
        async with self._blob(source, url) as answer:
            await self._require(answer, source, "read a layer", 200)
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    raise _lies(source, f"{blob.digest} is larger than its manifest says")
                digest.update(piece)
                await take(piece)
        if left or f"sha256:{digest.hexdigest()}" != blob.digest:
            raise _lies(source, f"{blob.digest} has another content")

    @asynccontextmanager
    async def _blob(self, source: Repository, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Get a blob, also where the registry says that another server has it."""
        async with self._call("GET", source, url, seconds=BLOB_SECONDS) as answer:
            if answer.status not in _REDIRECTS:
                yield answer
                return
            place = _location(source, url, answer)
        for _ in range(_MOST_REDIRECTS):
            # What is there is verified, and it gets no credential of the registry's.
            async with self._request("GET", source, place, {}, None, BLOB_SECONDS) as answer:
                if answer.status not in _REDIRECTS:
                    yield answer
                    return
                place = _location(source, place, answer)
        raise _lies(source, "its redirects do not end")

    async def _has(self, blob: Descriptor) -> bool:
        url = self.repository.url("blobs", blob.digest)
        async with self._call("HEAD", self.repository, url) as answer:
            if answer.status in _REDIRECTS:
                return True
            await self._require(answer, self.repository, "look for a layer", 200, 404)
            return answer.status == 200

    async def _begin(self, blob: Descriptor, source: Repository | None = None) -> str:
        """Begin an upload; return where to, empty where the registry has taken the blob of
        `source`. Raises SandboxError."""
        repository = self.repository
        url, more = f"{repository.url('blobs', 'uploads')}/", ""
        if source is not None:
            url += "?" + urlencode({"mount": blob.digest, "from": source.name})
            more = source.scope("pull")
        async with self._call("POST", repository, url, more=more, size=0) as answer:
            await self._require(answer, repository, "push a layer", 201, 202)
            if answer.status == 201:
                return ""
            where = _location(repository, url, answer)
        if _origin(where) != _origin(repository.origin):
            raise _lies(repository, "it has layers uploaded to another server")
        return where

    async def _upload(self, where: str, blob: Descriptor, file: IO[bytes]) -> None:
        sign = "&" if "?" in where else "?"
        async with self._call(
            "PUT",
            self.repository,
            f"{where}{sign}digest={quote(blob.digest)}",
            headers={"Content-Type": "application/octet-stream"},
            body=lambda: _pieces(file),
            size=blob.size,
            seconds=BLOB_SECONDS,
        ) as answer:
            await self._require(answer, self.repository, "push a layer", 201)

    async def _require(
        self, answer: aiohttp.ClientResponse, repository: Repository, what: str, *expected: int
    ) -> None:
        """Raise SandboxError for an answer with none of these statuses."""
        status = answer.status
        if status in expected:
            return
        codes = _error_codes(await _read(answer, repository, _ANSWER_BYTES))
        said = ": ".join((f"status {status}", *codes))
        if status in (401, 403):
            if repository.origin == self.repository.origin:
                raise _no_right(repository, what)
            raise InvalidConfiguration(
                f"{REGISTRY}: {repository.host} does not let the pool {what} of {repository.name} "
                f"without a credential ({said}). Push the base image to the registry of "
                f"{REGISTRY}, and name that one.",
                field=REGISTRY,
            )
        raise _unavailable(repository, f"cannot {what} of {repository.name}: {said}")

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        repository: Repository,
        url: str,
        *,
        actions: str = "",
        more: str = "",
        headers: Mapping[str, str] | None = None,
        body: Callable[[], AsyncIterator[bytes]] | None = None,
        size: int | None = None,
        seconds: float = 0.0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask a registry as who we are there. `more` is another scope. Raises SandboxError."""
        actions = actions or ("pull,push" if repository == self.repository else "pull")
        scopes = tuple(filter(None, (repository.scope(actions), more)))
        key = repository.origin, " ".join(scopes)
        sent = dict(headers or {})
        if size is not None:
            sent["Content-Length"] = str(size)
        for is_last in (False, True):
            authorization = self._authorizations.get(key)
            if authorization:
                sent["Authorization"] = authorization
            async with self._request(
                method, repository, url, sent, body() if body else None, seconds or CALL_SECONDS
            ) as answer:
                if answer.status != 401 or is_last:
                    yield answer
                    return
                challenges = answer.headers.getall("WWW-Authenticate", [])
            self._authorizations[key] = await self._authorize(repository, challenges, scopes)

    async def _authorize(
        self, repository: Repository, challenges: Sequence[str], scopes: Sequence[str]
    ) -> str:
        """Return the header by which a registry knows us. Raises SandboxError."""
        basic = self._basic if repository.origin == self.repository.origin else ""
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                given = dict(_PARAMETER.findall(rest))
                return f"Bearer {await self._token(repository, given, scopes, basic)}"
            if scheme.lower() == "basic" and basic:
                return f"Basic {basic}"
        if basic or repository.origin != self.repository.origin:
            raise _unavailable(repository, "asks for a way to sign in that is not known")
        raise _no_right(repository, "be used")

    async def _token(
        self, repository: Repository, given: Mapping[str, str], scopes: Sequence[str], basic: str
    ) -> str:
        # Whom a registry has sign us in is its choice: it could ask for the credential itself.
        realm = given.get("realm", "")
        query = [("service", given["service"])] if "service" in given else []
        query += [("scope", scope) for scope in scopes]
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        headers = {"Authorization": f"Basic {basic}"} if basic else {}
        async with self._request("GET", repository, url, headers, None, CALL_SECONDS) as answer:
            if answer.status in (400, 401, 403) and basic:
                raise _no_right(repository, "sign in")
            await self._require(answer, repository, "get a token", 200)
            found = _document(repository, await _read(answer, repository, _ANSWER_BYTES))
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise _lies(repository, "its token is none")
        return token

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        repository: Repository,
        url: str,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | None,
        seconds: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request to an address that is allowed. Raises SandboxError."""
        try:
            target = URL(url, encoded=True)
            rules().check_url(_origin(url))
        except ValueError:
            raise _unavailable(
                repository,
                "leads to an address that the pool service may not connect to. Its settings "
                "PROVIDER_ALLOWED_NETWORKS and PROVIDER_PLAIN_HTTP can allow it",
            ) from None
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=_CheckedResolver(rules())),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        timeout = aiohttp.ClientTimeout(seconds, sock_connect=10, sock_read=SILENCE_SECONDS)
        try:
            async with self._session.request(
                method,
                target,
                headers={"Accept-Encoding": "identity", **headers},
                data=body,
                allow_redirects=False,
                timeout=timeout,
            ) as answer:
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            cause = getattr(error, "os_error", None)
            reason = getattr(cause, "strerror", "") or type(error).__name__
            raise _unavailable(repository, f"does not answer: {reason}") from None


class _CheckedResolver(AbstractResolver):
    """Finds the addresses that the pool service may connect to."""

    def __init__(self, allowed: Rules) -> None:
        self._allowed = allowed

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        found = await asyncio.to_thread(self._allowed.resolve, host, port)
        return [
            ResolveResult(
                hostname=host,
                host=text,
                port=port,
                family=_family(text),
                proto=0,
                flags=0,
            )
            for text in found
        ]

    async def close(self) -> None:
        """Nothing is open."""


def _family(text: str) -> int:
    address = literal(text)
    return socket.AF_INET6 if address is not None and address.version == 6 else socket.AF_INET


def _platform(image: Reference, document: Mapping[str, Any], architecture: str) -> str:
    """Return the digest of an index's image for linux and an architecture. Raises SandboxError."""
    listed = document.get("manifests")
    for each in listed if isinstance(listed, list) else ():
        platform = each.get("platform") if isinstance(each, dict) else None
        if not isinstance(platform, dict):
            continue
        if (platform.get("os"), platform.get("architecture")) == ("linux", architecture):
            digest = each.get("digest")
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise _lies(image.repository, "an index has no digests")
            return digest
    raise InvalidConfiguration(
        f"template: {image.repository.host}/{image.repository.name} has no image "
        f"{image.reference[:80]} for linux/{architecture}, which the cluster's nodes are.",
        field="template",
    )


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _location(repository: Repository, url: str, answer: aiohttp.ClientResponse) -> str:
    """Return where an answer leads to. Raises SandboxError."""
    try:
        return urljoin(url, answer.headers["Location"])
    except (KeyError, ValueError):
        raise _lies(repository, "it leads to no address") from None


async def _read(answer: aiohttp.ClientResponse, repository: Repository, most: int) -> bytes:
    content = bytearray()
    async for piece in answer.content.iter_chunked(_PIECE_BYTES):
        content += piece
        if len(content) > most:
            raise _lies(repository, f"a document has more than {most >> 20} MiB")
    return bytes(content)


def _document(repository: Repository, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _lies(repository, "a document is not JSON")
    return found


def _error_codes(content: bytes) -> list[str]:
    """Return the codes of an error. Its texts may quote what was sent."""
    try:
        listed = json.loads(content)["errors"]
        return [each["code"] for each in listed[:3] if _CODE.fullmatch(each["code"])]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []


async def _bytes(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    await asyncio.to_thread(file.seek, 0)
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _refused(message: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"{REGISTRY}: {message}", field=REGISTRY)


def _no_right(repository: Repository, what: str) -> SandboxError:
    return InvalidConfiguration(
        f"{CREDENTIAL}: {repository.host} does not let the pool {what} of {repository.name}. Enter "
        f"user:password of an account that may pull there, and push to the repository of "
        f"{REGISTRY}.",
        field=CREDENTIAL,
    )


def _unavailable(repository: Repository, what: str) -> SandboxError:
    return ProviderUnavailable(
        f"{REGISTRY}: {repository.host} {what}. Check the registry, and its address in the "
        "provider's configuration.",
        field=REGISTRY,
    )


def _lies(repository: Repository, what: str) -> SandboxError:
    logger.warning("a registry of images is refused: %s: %s", repository.host, what)
    return ProviderUnavailable(
        f"{REGISTRY}: {repository.host} is refused: {what}. Use a registry that follows the OCI "
        "distribution specification.",
        field=REGISTRY,
    )
