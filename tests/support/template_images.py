"""Images that templates are based on, packages of Debian that tests make, and pools to run them."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from providers.runtime.launchers import container_guest
from providers.runtime.launchers.container_guest import DEFAULT_IMAGES
from providers.runtime.launchers.docker_engine import Engine
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import Revision, open_revision
from providers.runtime.service.settings import ServiceSettings
from providers.templates.base import Base
from providers.templates.declaration import Declaration
from providers.templates.lock import Lock
from providers.templates.resolve import Facts, facts_job, read_facts
from providers.templates.store import TemplateStore
from providers.values import ExecutionResult, Job
from tests.support.docker_engine import new_pool_id
from tests.support.images import entry, layer
from tests.support.package_index import PackageIndex

INSTALLED = "/usr/bin/hello-of-a-test"


@pytest.fixture(autouse=True)
def long_wait_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the image of a template as long as a busy machine takes to make it."""
    monkeypatch.setattr(container_guest, "MAKING_SECONDS", 120.0)


def make_deb(
    name: str,
    version: str = "1.0",
    files: Mapping[str, str] | None = None,
    scripts: Mapping[str, str] | None = None,
    depends: str = "",
) -> bytes:
    """Return a package of Debian with these programs, and scripts such as `postinst`."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "package"
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN").chmod(0o755)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: T <t@t.t>\n"
        control += f"Depends: {depends}\n" if depends else ""
        (root / "DEBIAN" / "control").write_text(f"{control}Description: Of a test\n")
        for path, text in (files or {}).items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
            place.chmod(0o755)
            for folder in place.parents:
                if root in folder.parents:
                    folder.chmod(0o755)
        for script, text in (scripts or {}).items():
            (root / "DEBIAN" / script).write_text(f"#!/bin/sh\nset -e\n{text}\n")
            (root / "DEBIAN" / script).chmod(0o755)
        target = Path(made) / "package.deb"
        command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(root), str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()


def hello(**parts: Any) -> bytes:
    """A package with one program."""
    return make_deb("hello-of-a-test", files={INSTALLED: "#!/bin/sh\necho hello\n"}, **parts)


def add_deb(index: PackageIndex, name: str, content: bytes, version: str = "1.0") -> Lock:
    """Serve a package; return the lock of it alone."""
    file_name = f"{name}_{version}_all.deb"
    url = index.add_file(file_name, content)
    digest = hashlib.sha256(content).hexdigest()
    return Lock.parse(apt=f"'{url}' {file_name} {len(content)} SHA256:{digest}")


def serve_debs(index: PackageIndex, **debs: bytes) -> str:
    """Serve these packages as a repository; return its line in /etc/apt/sources.list."""
    for name, content in debs.items():
        index.add_file(f"{name.replace('_', '-')}_1.0_all.deb", content)
    listed = _packages_of(index).encode()
    digest = f"{hashlib.sha256(listed).hexdigest()} {len(listed)} Packages"
    index.others["/./Packages"] = listed
    index.others["/./Release"] = f"Origin: test\nSHA256:\n {digest}\n".encode()
    return f"deb [trusted=yes] {index.url}/ ./\n"


def _packages_of(index: PackageIndex) -> str:
    found = []
    for name, content in index.files.items():
        if not name.endswith(".deb"):
            continue
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            said = subprocess.run(
                ["dpkg-deb", "--field", file.name], check=True, capture_output=True, text=True
            ).stdout
        found.append(
            f"{said}Filename: files/{name}\nSize: {len(content)}\n"
            f"SHA256: {hashlib.sha256(content).hexdigest()}\n"
        )
    return "\n".join(found)


class DockerImages:
    """Images of the engine that tests make of that of Python."""

    def __init__(self) -> None:
        self._engine = Engine()
        self._made: set[str] = set()

    def add(self, files: Mapping[str, str] | None = None) -> str:
        """Make an image with these files; return its name."""
        name = f"cofferdam-tests/{new_pool_id()}:1"
        self.change(name, files or {"etc/of-a-test": "first\n"})
        return name

    def change(self, name: str, files: Mapping[str, str]) -> None:
        """Have a name mean another image, with these files."""
        archive = layer(*((entry(path), text.encode()) for path, text in files.items()))
        usual = self._engine.image(DEFAULT_IMAGES["python"])
        assert usual is not None
        container = f"{new_pool_id()}-made"
        made = self._engine.add_files(usual["Id"], iter([archive]), container, {}, name)
        self._made.add(made)

    def remove(self) -> None:
        """Remove them, and what pools that have ended have made and left of them."""
        api = self._engine.client(60)
        found = {each["Id"]: each for each in api.images(all=True)}
        of_ours = _descendants(found, self._made)
        for each in api.containers(all=True):
            # Of a pool that was killed.
            if each["ImageID"] in of_ours:
                self._engine.remove(each["Id"])
        while of_ours:
            # Those first of which no other was made; their times are whole seconds.
            last = of_ours - {found[each]["ParentId"] for each in of_ours}
            for each in last:
                with suppress(docker.errors.ImageNotFound):
                    api.remove_image(each, force=True)
            of_ours -= last
        api.close()
        self._engine.close()


def images_of(client: docker.DockerClient, name: str) -> set[str]:
    """The ids of an image and of all that were made of it. Others may make and remove theirs."""
    found = {each["Id"]: each for each in client.api.images(all=True)}
    return _descendants(found, {client.images.get(name).id})


def _descendants(found: Mapping[str, Any], of: set[str]) -> set[str]:
    chosen = of & set(found)
    while more := {each for each in found if found[each]["ParentId"] in chosen} - chosen:
        chosen |= more
    return chosen


@contextmanager
def docker_images() -> Iterator[DockerImages]:
    made = DockerImages()
    try:
        yield made
    finally:
        made.remove()


class BasedPool:
    """A pool of one launcher, and the store that it looks into."""

    def __init__(self, kind: str, data_dir: Path, *, namespace: str = "", **settings: Any) -> None:
        self.store = TemplateStore(data_dir)
        choice = LauncherChoice(kind, data_dir, new_pool_id(), "ptrace", namespace=namespace)
        wanted = {"pool_size": 1, "max_sandboxes": 4, "queue_timeout": 120, **settings}
        self.loop = BackgroundLoop("based-pool")
        try:
            read = ServiceSettings.from_config(wanted)
            self.pool: Revision = self.loop.call(open_revision(choice, read))
        except BaseException:
            self.loop.stop()
            raise

    def run(self, code: str, digest: str, language: str = "python", **job: Any) -> ExecutionResult:
        async def run() -> ExecutionResult:
            name = await self.pool.template_launchers.add(self.pool.pool, language, digest)
            sandbox = await self.pool.pool.acquire(name, "")
            try:
                return await sandbox.run(Job(code, language, 60, **job))
            finally:
                await self.pool.pool.release(sandbox)

        return self.loop.call(run())

    def look_at(self, name: str, image: str = "") -> Facts:
        """What the image of this name says of itself."""
        digest = self.store.add_look(name)
        try:
            result = self.run(facts_job().code, digest)
        finally:
            self.store.remove(digest)
        assert result.exit_code == 0, result.stderr
        return read_facts(name, image or result.metadata["image_digest"], result.stdout)

    def build(self, lock: Lock | None = None, base: Base | None = None, **declared: Any) -> str:
        """Build a template; return its digest."""
        base = base or Base()
        declaration = Declaration(base=base.name, **declared)
        built = self.store.build(declaration, lock or Lock(), fetch, lambda line: None, base=base)
        return built.digest

    def close(self) -> None:
        async def close() -> None:
            await self.pool.pool.close()
            await self.pool.template_launchers.close()
            self.pool.launcher.close()
            await self.pool.launcher.disconnect()

        self.loop.call(close())
        self.loop.stop()


def fetch(url: str, most_bytes: int) -> Iterator[bytes]:
    yield httpx.get(url).content
