"""Images of templates: a base image and one more layer, pushed to the pool's repository.

A layer is made of the same files in the same bytes each time, so that the repository keeps what it
has, and a Pod names its image by a digest that was computed here.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import logging
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from providers.errors import CreationFailed, InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.runtime.launchers.container_guest import (
    Image,
    TemplateImages,
    image_of,
    place_of,
    release_for,
    with_template,
)
from providers.runtime.launchers.image_registry import (
    LAYERS,
    REGISTRY,
    Descriptor,
    ImageRegistry,
    Manifest,
    Missing,
    Reference,
)
from providers.runtime.launchers.kubernetes.manifest import POOL_LABEL
from providers.runtime.launchers.kubernetes.settings import KubernetesSettings
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.files import image_archive

logger = logging.getLogger(__name__)

# Each takes a processor and room in the data directory.
PARALLEL_IMAGES = 2
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# What a Pod of an image says of it, and the digest that its node has.
Probe = Callable[[str], Awaitable[tuple[dict[str, Any], str]]]


class PodTemplates:
    """The images of a pool's templates. Used in one event loop."""

    def __init__(self, settings: KubernetesSettings, probe: Probe) -> None:
        self._settings, self._probe = settings, probe
        self._registry: ImageRegistry | None = None
        self._images = TemplateImages(self._make)
        self._slots = asyncio.Semaphore(PARALLEL_IMAGES)
        self._architecture = ""
        # Of images that templates are based on, by their name with the digest.
        self._bases: dict[str, Image] = {}
        # The digests of images that were pushed, by template and base image.
        self._pushed: dict[tuple[str, str], str] = {}
        self._pool = hashlib.sha256(settings.pool.encode()).hexdigest()[:12]
        self._may_delete = True

    def know_machine(self, machine: str) -> None:
        """Take note of what `uname -m` says on the nodes."""
        self._architecture = _ARCHITECTURES.get(machine, machine)

    async def make(self, usual: Image | None, digest: str, folder: Path) -> Image:
        """Return the image of a template, made of the usual image for the language or of its base.

        Raises SandboxError.
        """
        return await self._images.make(usual, digest, folder)

    async def drop(self, image: Image) -> None:
        """Remove the image of a template from the repository, where the registry allows that."""
        if not image.folder or self._registry is None or not self._may_delete:
            return
        try:
            self._may_delete = await self._registry.delete_manifest(image.digest)
        except SandboxError as error:
            logger.warning("the image of a template was not removed: %s", error.message)
            return
        if self._may_delete:
            left = {key: each for key, each in self._pushed.items() if each != image.digest}
            self._pushed = left
        else:
            logger.warning(
                "the registry deletes no images: remove those of templates there yourself",
                extra={"repository": self._settings.registry},
            )

    async def close(self) -> None:
        """Give up what is being made, and close the connections."""
        self._images.close()
        if self._registry is not None:
            await self._registry.close()

    def _open(self) -> ImageRegistry:
        """Return the client of the pool's repository. Raises InvalidConfiguration."""
        settings = self._settings
        if not settings.registry:
            raise InvalidConfiguration(
                f"{REGISTRY}: Templates in Pods need a repository of images. Name one that the "
                "pool may push to and the nodes can pull from, under Images of the provider.",
                field=REGISTRY,
            )
        if self._registry is None:
            folder = settings.data_dir or Path(tempfile.gettempdir())
            self._registry = ImageRegistry(settings.registry, settings.registry_credential, folder)
        return self._registry

    async def _make(self, usual: Image | None, digest: str, folder: Path) -> Image:
        base, registry = bases.read(folder), self._open()
        async with self._slots:
            if base.kind == "image":
                image, manifest = await self._find_base(registry, base)
                if base.look:
                    return image
                return await self._add(
                    registry, image, manifest, digest, folder, interpreter=base.interpreter
                )
            if usual is None:
                raise CreationFailed("Kubernetes: there is no image for the language.")
            release = release_for(folder, usual)
            manifest = await self._find_usual(registry, usual)
            return await self._add(registry, usual, manifest, digest, folder, release)

    async def _find_usual(self, registry: ImageRegistry, usual: Image) -> Manifest:
        """Return the manifest of an image that was probed: of the very one, where it is known."""
        named = Reference.parse(usual.id, registry.repository)
        if _DIGEST.fullmatch(usual.digest):
            # A node that was given the image by hand has a digest of its own.
            with suppress(Missing):
                exact = replace(named, reference=usual.digest)
                return await registry.resolve(exact, self._architecture)
        return await registry.resolve(named, self._architecture)

    async def _find_base(self, registry: ImageRegistry, base: Base) -> tuple[Image, Manifest]:
        """Return the image that a template is based on. Raises SandboxError."""
        named = Reference.parse(base.image_name, registry.repository)
        manifest = await registry.resolve(named, self._architecture)
        bases.check_unchanged(base, manifest.digest)
        name = manifest.repository.image(manifest.digest)
        if name not in self._bases:
            config = await registry.read_config(manifest)
            if (config.get("config") or {}).get("Volumes"):
                raise InvalidConfiguration(
                    f"template: The image {base.image_name} declares volumes, which could be "
                    "written to. Build it without VOLUME.",
                    field="template",
                )
            try:
                answer, _ = await self._probe(name)
            except (CreationFailed, ProviderUnavailable) as error:
                raise InvalidConfiguration(
                    f"template: The image {base.image_name} cannot be used. It needs a python3 of "
                    f"3.9 or newer in its PATH. {error.message}",
                    field="template",
                ) from None
            self._bases[name] = image_of(name, manifest.digest, answer)
        return self._bases[name], manifest

    async def _add(
        self,
        registry: ImageRegistry,
        base: Image,
        manifest: Manifest,
        digest: str,
        folder: Path,
        release: str = "",
        interpreter: str = "",
    ) -> Image:
        """Return the base image with one more layer, which is pushed. Raises SandboxError."""
        key = digest, manifest.digest
        if key not in self._pushed:
            archive = image_archive(folder, place_of(digest), release, interpreter)
            self._pushed[key] = await self._push(registry, manifest, archive, digest)
        pushed = self._pushed[key]
        name = registry.repository.image(pushed)
        made = with_template(base, name, digest, has_interpreter=bool(interpreter))
        return replace(made, digest=pushed)

    async def _push(
        self, registry: ImageRegistry, manifest: Manifest, archive: Iterator[bytes], digest: str
    ) -> str:
        """Push an image with one more layer; return its digest. Raises SandboxError."""
        config = await registry.read_config(manifest)
        if (config.get("os"), config.get("architecture")) != ("linux", self._architecture):
            raise InvalidConfiguration(
                f"template: Its base image is for {config.get('os')!r:.20} and "
                f"{config.get('architecture')!r:.20}, and the nodes are linux and "
                f"{self._architecture}.",
                field="template",
            )
        try:
            with tempfile.TemporaryFile(dir=self._settings.data_dir) as file:
                layer = await asyncio.to_thread(_write_layer, archive, file)
                blob = Descriptor(LAYERS[manifest.media_type], layer.digest, layer.size)
                for each in dict.fromkeys(manifest.layers):
                    await registry.copy_blob(manifest.repository, each)
                await registry.put_blob(blob, file)
        except OSError as error:
            raise CreationFailed(
                f"template: The data directory of the pool service cannot take its layer: "
                f"{error.strerror}."
            ) from error
        content = _to_bytes(self._with_layer(config, layer.diff_id))
        described = Descriptor(
            manifest.config.media_type,
            f"sha256:{hashlib.sha256(content).hexdigest()}",
            len(content),
        )
        await registry.put_blob(described, io.BytesIO(content))
        pushed = {
            "schemaVersion": 2,
            "mediaType": manifest.media_type,
            "config": described.to_json(),
            "layers": [each.to_json() for each in (*manifest.layers, blob)],
        }
        tag = f"{self._pool}-{digest[:24]}-{manifest.digest.removeprefix('sha256:')[:12]}"
        return await registry.put_manifest(tag, manifest.media_type, _to_bytes(pushed))

    def _with_layer(self, config: dict[str, Any], diff_id: str) -> dict[str, Any]:
        """Return a configuration with one more layer. No other pool has, or deletes, the same."""
        own = dict(config.get("config") or {})
        own["Labels"] = {**(own.get("Labels") or {}), POOL_LABEL: self._pool}
        rootfs = config["rootfs"]
        history = [*(config.get("history") or []), {"created_by": "cofferdam template"}]
        return {
            **config,
            "config": own,
            "rootfs": {**rootfs, "diff_ids": [*rootfs["diff_ids"], diff_id]},
            "history": history,
        }


@dataclass(frozen=True)
class _Layer:
    diff_id: str
    digest: str
    size: int


class _Digested:
    """A file that is written to, and the digest of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._digest.hexdigest()}"


def _write_layer(archive: Iterator[bytes], file: IO[bytes]) -> _Layer:
    """Write a tar archive, compressed. The same archive comes to the same bytes. Raises OSError."""
    plain, written = hashlib.sha256(), _Digested(file)
    with gzip.GzipFile("", "wb", 6, cast("IO[bytes]", written), mtime=0) as packed:
        for piece in archive:
            plain.update(piece)
            packed.write(piece)
    written.flush()
    return _Layer(f"sha256:{plain.hexdigest()}", written.digest, written.size)


def _to_bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
