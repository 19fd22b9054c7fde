"""Registries of images on loopback: Debian's docker-registry, and one that says what a test wants."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx

from tests.support.docker_engine import small_root
from tests.support.images import ARCHITECTURE, config_of, entry, layer
from tests.support.processes import ROOT, clean_environment, free_port, started
from tests.support.required import require
from tests.support.waiting import wait_until

USER, PASSWORD = "pusher", "of-a-test-credential"
# Of that password, by bcrypt.
_HASH = "$2b$04$abcdefghijklmnopqrstuujEw9hppRcb2PunTl5zo2r.Pf2fvXMkK"

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_KINDS = {
    OCI_MANIFEST: (
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.oci.image.layer.v1.tar+gzip",
    ),
    DOCKER_MANIFEST: (
        "application/vnd.docker.container.image.v1+json",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
    ),
}


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def described(kind: str, content: bytes) -> dict[str, Any]:
    """The descriptor of a blob."""
    return {"mediaType": kind, "digest": digest_of(content), "size": len(content)}


@dataclass
class PackedImage:
    """An image as registries have it."""

    media_type: str
    manifest: bytes
    blobs: dict[str, bytes]
    document: dict[str, Any]

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


def packed(
    layers: Sequence[bytes],
    media_type: str = OCI_MANIFEST,
    *,
    is_zipped: bool = True,
    **config: Any,
) -> PackedImage:
    """An image of these layers, which are tar archives."""
    of_config, of_layers = _KINDS[media_type]
    made = json.dumps(config_of(layers, **config)).encode()
    written = [gzip.compress(each, 1, mtime=0) if is_zipped else each for each in layers]
    if not is_zipped:
        of_layers = of_layers.removesuffix("+gzip").removesuffix(".gzip")
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": described(of_config, made),
        "layers": [described(of_layers, each) for each in written],
    }
    blobs = {digest_of(each): each for each in (made, *written)}
    return PackedImage(media_type, json.dumps(document).encode(), blobs, document)


def python_layer() -> bytes:
    """A small system of this machine's Python and Bash, without what no program imports."""
    unwanted = ("/config-", "/dist-packages/", "/pydoc_data/", "/ensurepip/")
    return _without(small_root(), unwanted)


def program_layer(*names: str) -> bytes:
    """Programs of this machine, in /usr/bin, with the libraries that they need."""
    found = BytesIO()
    with tarfile.open(fileobj=found, mode="w", dereference=True) as archive:
        for name in names:
            program = os.path.realpath(require(name))
            archive.add(program, arcname=f"usr/bin/{name}")
            listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
            for library in sorted(set(re.findall(r"(/\S+)", listed.stdout))):
                archive.add(library, arcname=library)
        # What Debian's Node.js has outside its program.
        for each in ("acorn", "acorn-walk", "cjs-module-lexer", "undici") * ("node" in names):
            if (built_in := Path("/usr/share/nodejs", each)).exists():
                archive.add(built_in, arcname=str(built_in))
    return found.getvalue()


def upper_layer() -> bytes:
    """A last layer, with a file that hides one of a lower layer."""
    return layer((entry("etc/of-the-image"), b"upper\n"), (entry("etc/.wh.hidden"), b""))


def hidden_layer() -> bytes:
    return layer((entry("etc/hidden"), b"lower\n"), (entry("etc/of-the-image"), b"lower\n"))


def _without(archive: bytes, parts: Sequence[str]) -> bytes:
    kept = BytesIO()
    with (
        tarfile.open(fileobj=BytesIO(archive)) as source,
        tarfile.open(fileobj=kept, mode="w") as target,
    ):
        for member in source:
            if not any(part in f"/{member.name}" for part in parts):
                target.addfile(member, source.extractfile(member) if member.isreg() else None)
    return kept.getvalue()


class Registry:
    """A running docker-registry, and what a test puts into it and reads of it."""

    def __init__(self, port: int, folder: Path, credential: tuple[str, str] | None) -> None:
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"
        self.log = folder / "log"
        self.client = httpx.Client(base_url=f"{self.url}/v2", auth=credential, timeout=60)

    def push(self, name: str, image: PackedImage, tag: str = "1") -> str:
        """Push an image; return its name with the tag."""
        for digest, blob in image.blobs.items():
            began = self.client.post(f"/{name}/blobs/uploads/").raise_for_status()
            where = httpx.URL(began.headers["Location"])
            content = {"Content-Type": "application/octet-stream"}
            where = where.copy_add_param("digest", digest)
            self.client.put(where, content=blob, headers=content).raise_for_status()
        self.push_manifest(name, tag, image.media_type, image.manifest)
        return f"{self.host}/{name}:{tag}"

    def push_manifest(self, name: str, tag: str, media_type: str, content: bytes) -> None:
        headers = {"Content-Type": media_type}
        url = f"/{name}/manifests/{tag}"
        self.client.put(url, content=content, headers=headers).raise_for_status()

    def tags(self, name: str) -> list[str]:
        """The tags of a repository, none where there is no repository."""
        answer = self.client.get(f"/{name}/tags/list")
        return [] if answer.status_code == 404 else answer.json()["tags"] or []

    def manifest(self, name: str, tag: str) -> dict[str, Any]:
        headers = {"Accept": ", ".join((*_KINDS, OCI_INDEX))}
        answer = self.client.get(f"/{name}/manifests/{tag}", headers=headers)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def requests(self, method: str, part: str) -> int:
        """How many requests there were with this method and part of an address."""
        lines = self.log.read_text(errors="replace").splitlines()
        return sum(f'"{method} ' in line and part in line for line in lines)


@contextmanager
def registry(
    folder: Path, *, has_users: bool = False, may_delete: bool = True
) -> Iterator[Registry]:
    """A docker-registry with its files in a folder. With users it lets in USER alone."""
    program = require("docker-registry")
    folder.mkdir(exist_ok=True)
    port = free_port()
    settings: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": False}},
        "storage": {
            "filesystem": {"rootdirectory": str(folder / "images")},
            "delete": {"enabled": may_delete},
        },
        "http": {"addr": f"127.0.0.1:{port}", "secret": "of-a-test"},
    }
    if has_users:
        (folder / "users").write_text(f"{USER}:{_HASH}\n")
        settings["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "users")}}
    # JSON is YAML.
    (folder / "config.yml").write_text(json.dumps(settings))
    command = [program, "serve", str(folder / "config.yml")]
    environment = clean_environment(folder, PORT=str(port))
    with started(command, environment, ROOT, folder / "log"):
        running = Registry(port, folder, (USER, PASSWORD) if has_users else None)

        def answers() -> bool:
            try:
                return running.client.get("/").status_code == 200
            except httpx.TransportError:
                return False

        with running.client:
            wait_until(answers, seconds=60)
            yield running


@dataclass
class Answer:
    """What a LyingRegistry answers."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    # Sends the content until the client has enough.
    is_endless: bool = False
    # Sends nothing more after the content.
    is_silent: bool = False


@dataclass
class Received:
    """A request to a LyingRegistry."""

    method: str
    path: str
    headers: Mapping[str, str]


Lie = Callable[[Received], Answer | None]


class LyingRegistry:
    """A registry of one image that is honest but where `lie` returns another answer."""

    def __init__(self, image: PackedImage, port: int) -> None:
        self.image = image
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"
        self.received: list[Received] = []
        self.lie: Lie = lambda request: None
        self.is_over = threading.Event()

    def answer(self, request: Received) -> Answer:
        """The answer of a request whose body was read."""
        self.received.append(request)
        return self.lie(request) or self._honest(request)

    def _honest(self, request: Received) -> Answer:
        parts = request.path.partition("?")[0].split("/")
        if request.method in ("GET", "HEAD") and parts[-2] == "manifests":
            about = {
                "Content-Type": self.image.media_type,
                "Docker-Content-Digest": self.image.digest,
            }
            return Answer(200, about, self.image.manifest)
        if request.method in ("GET", "HEAD") and parts[-2] == "blobs":
            blob = self.image.blobs.get(parts[-1])
            return Answer(404) if blob is None else Answer(200, {}, blob)
        if request.method == "POST":
            return Answer(202, {"Location": f"{request.path.partition('?')[0]}1"})
        return Answer(201)


@contextmanager
def lying_registry(image: PackedImage) -> Iterator[LyingRegistry]:
    """A server over a real socket."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:
                # The client has had enough.
                self.close_connection = True

        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = dict(self.headers.items())
            answer = served.answer(Received(self.command, self.path, headers))
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.is_endless or answer.is_silent:
                self.end_headers()
                self.close_connection = True
                self.wfile.write(answer.content)
                while not served.is_over.wait(60 if answer.is_silent else 0):
                    self.wfile.write(answer.content)
                return
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.content)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = LyingRegistry(image, server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        served.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def index_of(*images: PackedImage) -> bytes:
    """An index of images for other machines and, at last, for this one."""
    machines = ["s390x"] * (len(images) - 1) + [ARCHITECTURE]
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": [
                {
                    **described(image.media_type, image.manifest),
                    "platform": {"os": "linux", "architecture": machine},
                }
                for image, machine in zip(images, machines, strict=True)
            ],
        }
    ).encode()
