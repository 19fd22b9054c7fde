"""An index of Python packages and of npm's over HTTP, with packages that tests make."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_DATE = (2026, 1, 1, 0, 0, 0)
_HELD_SECONDS = 60.0
_JSON = "application/vnd.pypi.simple.v1+json"


def make_wheel(
    name: str,
    version: str = "1.0",
    files: Mapping[str, str | bytes] | None = None,
    requires: tuple[str, ...] = (),
    licence: str = "MIT",
) -> bytes:
    """Return a wheel with these files; without any it has the module `name`, with VERSION."""
    module = name.replace("-", "_")
    given = {f"{module}.py": f"VERSION = {version!r}\n"} if files is None else files
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: {licence}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    own = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {**given, **own}.items():
            archive.writestr(zipfile.ZipInfo(path, _DATE), content)
    return buffer.getvalue()


BACKEND = """
import io, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    said = {info!r}
    content = {{**{files!r}, said + "/WHEEL": {wheel!r}, said + "/RECORD": ""}}
    content[said + "/METADATA"] = {metadata!r}
    {extra}
    with zipfile.ZipFile(folder + "/" + {name!r}, "w") as archive:
        for path, text in content.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return {name!r}
"""


def make_sdist(
    name: str, version: str = "1.0", *, extra: str = "pass", wheel_name: str = ""
) -> bytes:
    """Return a source distribution that builds itself to a wheel with the module `name`.

    `extra` is a line of Python that its build runs, and `wheel_name` what it calls the wheel.
    """
    backend = BACKEND.format(
        info=f"{name}-{version}.dist-info",
        files={f"{name}.py": f"VERSION = {version!r}\n", "evil.pth": "import evil\n"},
        wheel="Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        metadata=f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT\n",
        extra=extra,
        name=wheel_name or f"{name}-{version}-py3-none-any.whl",
    )
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    # Without a build nothing else is known of it.
    static = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
    files = {"pyproject.toml": project, "backend.py": backend, "PKG-INFO": static}
    return make_tarball(files, f"{name}-{version}")


def make_tarball(files: Mapping[str, str], folder: str = "package") -> bytes:
    """Return an npm package with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{folder}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


class PackageIndex:
    """What it serves may be changed at any time. `requests` are the paths that were asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.simple = f"{url}/simple"
        self.files: dict[str, bytes] = {}
        self.hashes: dict[str, str] = {}
        # The reasons by the names of files.
        self.yanked: dict[str, str] = {}
        self.speaks_json = False
        self.npm: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        # Pages of projects in place of the usual, by name.
        self.pages: dict[str, str] = {}
        # Files that are other ones once they were asked for, by name.
        self.changed_after_first: dict[str, bytes] = {}
        # Pages of projects that come once a test says so, by name.
        self.held: dict[str, threading.Event] = {}
        # Other files, by path.
        self.others: dict[str, bytes] = {}

    def add(self, name: str, version: str = "1.0", **parts: Any) -> str:
        """Serve a wheel; return its address."""
        file_name = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        return self.add_file(file_name, make_wheel(name, version, **parts))

    def add_file(self, file_name: str, content: bytes) -> str:
        self.files[file_name] = content
        self.hashes[file_name] = hashlib.sha256(content).hexdigest()
        return f"{self.url}/files/{file_name}"

    def add_npm(self, name: str, version: str, files: Mapping[str, str]) -> None:
        described = {"name": name, "version": version}
        content = make_tarball({"package.json": json.dumps(described), **files})
        file_name = f"{name.replace('/', '-')}-{version}.tgz"
        integrity = base64.b64encode(hashlib.sha512(content).digest()).decode()
        dist = {"tarball": self.add_file(file_name, content), "integrity": f"sha512-{integrity}"}
        self.npm[name] = {
            "name": name,
            "dist-tags": {"latest": version},
            "versions": {version: {**described, "dist": dist}},
        }

    def pylock(self, *names: str) -> str:
        """Return the lock that uv would write of these files."""
        parts = ['lock-version = "1.0"\ncreated-by = "uv"\n']
        for name in names:
            package, version, *_ = name.split("-")
            is_wheel = name.endswith(".whl")
            version = version.removesuffix(".tar.gz")
            opened, closed = ("wheels = [", "]") if is_wheel else ("sdist = ", "")
            parts.append(
                f'[[packages]]\nname = "{package.replace("_", "-")}"\nversion = "{version}"\n'
                f'{opened}{{ url = "{self.url}/files/{name}", size = {len(self.files[name])}, '
                f'hashes = {{ sha256 = "{self.hashes[name]}" }} }}{closed}\n'
            )
        return "\n".join(parts)

    def _yanked(self, file_name: str) -> str:
        reason = self.yanked.get(file_name)
        return "" if reason is None else f' data-yanked="{html.escape(reason)}"'

    def _page_in_json(self, name: str, found: list[str]) -> bytes:
        files = [
            {
                "filename": each,
                "url": f"{self.url}/files/{each}",
                "hashes": {"sha256": self.hashes[each]},
                "yanked": self.yanked.get(each, False) or each in self.yanked,
            }
            for each in found
        ]
        page = {"meta": {"api-version": "1.0"}, "name": name, "files": files}
        return json.dumps(page).encode()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        self.requests.append(path)
        if path in self.others:
            return 200, "application/octet-stream", self.others[path]
        if path.startswith("/files/"):
            file_name = path.removeprefix("/files/")
            content = self.files.get(file_name)
            if file_name in self.changed_after_first:
                self.files[file_name] = self.changed_after_first.pop(file_name)
            return (
                (404, "text/plain", b"") if content is None else (200, "application/zip", content)
            )
        if path.startswith("/simple/"):
            name = path.removeprefix("/simple/").strip("/").replace("-", "_")
            if name in self.held:
                self.held[name].wait(_HELD_SECONDS)
            found = [each for each in self.files if each.lower().startswith(f"{name}-")]
            if self.speaks_json and name not in self.pages:
                return 200 if found else 404, _JSON, self._page_in_json(name, found)
            links = [
                f'<a href="/files/{each}#sha256={self.hashes[each]}"{self._yanked(each)}>{each}</a>'
                for each in found
            ]
            links = [self.pages[name]] if name in self.pages else links
            page = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
            return (200 if links else 404, "text/html", page.encode())
        package = self.npm.get(path.lstrip("/").replace("%2f", "/"))
        if package is None:
            return 404, "application/json", b"{}"
        return 200, "application/json", json.dumps(package).encode()


@contextmanager
def package_index() -> Iterator[PackageIndex]:
    """Serve an empty index on the loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, kind, content = index.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            """Nothing: tests look at `requests`."""

    # Programs in sandboxes take 127.0.0.1 for their own.
    server = ThreadingHTTPServer(("127.77.0.1", 0), Handler)
    index = PackageIndex(f"http://127.77.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
