"""Archives of images for tests: as the tools write them, and as somebody who means harm would."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.docker_engine import small_root

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")
MARKER = "ID=an-image-of-a-test\n"


def entry(name: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = more.pop("mode", 0o755 if kind == tarfile.DIRTYPE else 0o644)
    for key, value in more.items():
        setattr(info, key, value)
    return info


def link(name: str, target: str) -> tarfile.TarInfo:
    return entry(name, tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return entry(name, tarfile.LNKTYPE, linkname=target)


def layer(*members: tarfile.TarInfo | tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    """A layer of these entries; files are a name and their content."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            named, content = member
            info = named if isinstance(named, tarfile.TarInfo) else entry(named)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def config_of(layers: Sequence[bytes], **config: Any) -> dict[str, Any]:
    return {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"], **config},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest_of(each)}" for each in layers]},
    }


def write_archive(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = entry(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def oci_files(
    layers: Sequence[bytes], config: Mapping[str, Any] | None = None, *, zipped: bool = True
) -> dict[str, bytes]:
    """The files of an OCI image layout."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        blobs[f"blobs/sha256/{digest_of(content)}"] = content
        name = f"application/vnd.oci.image.{kind}"
        return {
            "mediaType": name,
            "digest": f"sha256:{digest_of(content)}",
            "size": len(content),
        }

    described = json.dumps(config or config_of(layers)).encode()
    manifest = {
        "schemaVersion": 2,
        "config": blob(described, "config.v1+json"),
        "layers": [
            blob(gzip.compress(each, 1) if zipped else each, "layer.v1.tar") for each in layers
        ],
    }
    index = {
        "schemaVersion": 2,
        "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")],
    }
    layout = b'{"imageLayoutVersion": "1.0.0"}'
    return {"oci-layout": layout, "index.json": json.dumps(index).encode(), **blobs}


def docker_files(
    layers: Sequence[bytes], config: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """The files that `docker save` wrote until version 25, and `skopeo` writes much like them."""
    described = json.dumps(config or config_of(layers)).encode()
    name = f"{digest_of(described)}.json"
    files = {f"{number}/layer.tar": each for number, each in enumerate(layers)}
    manifest = [{"Config": name, "RepoTags": ["test:latest"], "Layers": list(files)}]
    return {**files, name: described, "manifest.json": json.dumps(manifest).encode()}


def oci_archive(path: Path, *layers: bytes, **how: Any) -> Path:
    return write_archive(path, oci_files(layers, **how))


def machine_layers(*, with_python: bool = True) -> list[bytes]:
    """A small system of this machine's Python and Bash with an os-release of its own, in three
    layers. Both are found by PATH alone, in /opt/tools/bin."""
    links = [link("opt/tools/bin/bash", "/bin/bash")]
    if with_python:
        links.append(link("opt/tools/bin/python3", "/usr/bin/python3"))
    own = layer(
        *links,
        # Contexts of shells need it.
        (entry("usr/bin/head", mode=0o755), Path("/usr/bin/head").read_bytes()),
        ("etc/os-release", MARKER.encode()),
        ("usr/share/former", b"of a lower layer"),
    )
    return [small_root(), own, layer(("usr/share/.wh.former", b""))]


def machine_archive(path: Path, **what: Any) -> Path:
    """An OCI image layout of that."""
    layers = machine_layers(**what)
    environment = ["PATH=/opt/tools/bin", "OF_THE_IMAGE=yes", "TMPDIR=/nowhere"]
    return oci_archive(path, *layers, config=config_of(layers, Env=environment))
