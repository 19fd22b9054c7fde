"""Images that a virtual node pulls from a registry on loopback, and unpacks, as a kubelet does."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from providers.runtime.launchers.image_archive import Archive, unpack
from tests.support.images import write_archive
from tests.support.pod_bundles import BadContainer

_LOCAL = re.compile(r"(127\.0\.0\.1:\d+)/([^@:]+)(?::([^@]+))?(?:@(sha256:[0-9a-f]+))?")
_KINDS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_one_at_a_time = threading.Lock()


def is_pulled(image: str) -> bool:
    """Whether an image is of a registry on loopback."""
    return _LOCAL.fullmatch(image) is not None


def pull(image: str, images: Path, secrets: list[dict[str, bytes]]) -> str:
    """Have the file `images` know an image, which is pulled unless it was; return its id.

    `secrets` are the data of image pull secrets. Raises BadContainer.
    """
    found = _LOCAL.fullmatch(image)
    assert found is not None
    host, name, tag, digest = found.groups()
    with _one_at_a_time:
        known = json.loads(images.read_text()) if images.exists() else {}
        if image in known:
            return str(known[image]["id"])
        folder = Path(tempfile.mkdtemp(dir=images.parent, prefix="pulled-"))
        folder.chmod(0o711)
        with httpx.Client(base_url=f"http://{host}/v2/{name}", timeout=60) as client:
            try:
                if credential := _credential(host, secrets):
                    client.auth = httpx.BasicAuth(*credential)
                manifest = client.get(
                    f"/manifests/{digest or tag or 'latest'}",
                    headers={"Accept": ", ".join(_KINDS)},
                ).raise_for_status()
                config = _unpack(client, manifest, folder)
            except httpx.HTTPError as error:
                shutil.rmtree(folder)
                raise BadContainer("ErrImagePull", f"{image}: {error}") from error
        identity = f"{host}/{name}@{manifest.headers['Docker-Content-Digest']}"
        root = {"root": str(folder / "rootfs"), "config": config, "id": identity}
        new = images.with_suffix(".pulled")
        new.write_text(json.dumps({**known, image: root}))
        new.rename(images)
        return identity


def _credential(host: str, secrets: list[dict[str, bytes]]) -> tuple[str, str] | None:
    for secret in secrets:
        known = json.loads(secret[".dockerconfigjson"])["auths"]
        if host in known:
            user, _, password = base64.b64decode(known[host]["auth"]).decode().partition(":")
            return user, password
    return None


def _unpack(client: httpx.Client, manifest: httpx.Response, folder: Path) -> dict[str, Any]:
    """Unpack an image below a folder; return its configuration. Every digest is verified."""
    digest = manifest.headers["Docker-Content-Digest"]
    document: Mapping[str, Any] = manifest.json()
    described = {"mediaType": document["mediaType"], "digest": digest}
    index = {"schemaVersion": 2, "manifests": [described]}
    files = {"index.json": json.dumps(index).encode(), _path(digest): manifest.content}
    for each in (document["config"], *document["layers"]):
        blob = client.get(f"/blobs/{each['digest']}").raise_for_status()
        files[_path(each["digest"])] = blob.content
    with Archive(write_archive(folder / "image.tar", files)) as archive:
        unpack(archive, folder)
    (folder / "image.tar").unlink()
    config: dict[str, Any] = json.loads(files[_path(document["config"]["digest"])])["config"]
    return config


def _path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
