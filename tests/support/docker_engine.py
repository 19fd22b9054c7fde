"""Docker for tests: the shared engine, engines of a test's own, and a proxy that misbehaves."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import tarfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
import pytest
import requests

from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.launchers.docker_owner import POOL_LABEL
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.sandbox import Sandbox
from tests.support.launcher_loop import LauncherLoop
from tests.support.required import missing, require
from tests.support.waiting import wait_until

SMALL_IMAGE = "cofferdam-tests/small"

_pools = itertools.count()


def new_pool_id() -> str:
    return f"test-{os.getpid()}-{next(_pools)}"


# Each look is a child of its own: what it changes of itself is gone with it. OUTPUT is what the
# program's output is.
LOOKS = """
import json, os
seen, output = {}, os.readlink("/proc/self/fd/1")
for name, code in WANTED.items():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        os.dup2(writer, 1)
        exec(compile(code, name, "exec"), {"__name__": "__main__", "OUTPUT": output})
        raise SystemExit
    os.close(writer)
    with os.fdopen(reader) as stream:
        seen[name] = stream.read()
    os.wait()
print(json.dumps(seen))
"""


class Containers(LauncherLoop):
    """A DockerLauncher in a loop of its own, and what it has on the engine."""

    def __init__(self, runtime: str = "auto", **settings: Any) -> None:
        self.settings = DockerSettings(**{"runtime": runtime, "pool_id": new_pool_id(), **settings})
        self.client = docker.DockerClient(
            base_url=self.settings.base_url or os.environ["DOCKER_HOST"], timeout=60
        )
        self.loop = BackgroundLoop("docker-tests")
        self.launcher = DockerLauncher(self.settings)
        try:
            self.loop.call(self.launcher.prepare())
        except BaseException:
            self.close()
            raise

    def look(self, code: str, **options: Any) -> Any:
        """The JSON that Python code prints in a fresh container."""
        result = self.run(code, **options)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def look_at_all_in(self, sandbox: Sandbox, codes: Mapping[str, str]) -> dict[str, Any]:
        """The JSON that each of these programs prints, all of them in one run."""
        wanted = {name: textwrap.dedent(code) for name, code in codes.items()}
        result = self.run_in(sandbox, LOOKS.replace("WANTED", repr(wanted)), timeout=60)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert all(found.values()), (found, result.stderr)
        return {name: json.loads(text) for name, text in found.items()}

    def present(self) -> list[Any]:
        """This pool's containers on the engine, whatever their state."""
        wanted = {"label": f"{POOL_LABEL}={self.settings.pool_id}"}
        found: list[Any] = self.client.containers.list(
            all=True, filters=wanted, ignore_removed=True
        )
        return found

    def close(self) -> None:
        self.launcher.close()
        self.loop.stop()
        self.client.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """The engine that DOCKER_HOST names, with the images built.

    What this process has found in an image under a runtime, it does not look for again.
    """
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as error:
        missing(f"no Docker engine answers ({error})")
    os.environ.setdefault("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        client.images.get("cofferdam/python")
        client.images.get("cofferdam/nodejs")
    except docker.errors.ImageNotFound:
        missing("the images are not built (manage.py build_images)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DockerLauncher, "_probe", _probing_once())
        yield client
    client.close()


def _probing_once() -> Callable[..., dict[str, Any]]:
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    probe = DockerLauncher._probe

    def look(
        self: DockerLauncher, runtime: str, image: Mapping[str, Any], sources: Mapping[str, Any]
    ) -> dict[str, Any]:
        about = (self._settings.base_url, runtime, image["Id"], *sorted(sources))
        if about not in found:
            found[about] = probe(self, runtime, image, sources)
        return found[about]

    return look


@pytest.fixture(scope="session")
def containers_of(engine: docker.DockerClient) -> Iterator[Callable[[str], Containers]]:
    opened: dict[str, Containers] = {}

    def get(runtime: str) -> Containers:
        if runtime not in engine.info()["Runtimes"]:
            missing(f"the engine has no runtime {runtime}")
        if runtime not in opened:
            opened[runtime] = Containers(runtime)
        return opened[runtime]

    yield get
    for containers in opened.values():
        left = containers.present()
        containers.close()
        assert left == []


@pytest.fixture
def under_runc(containers_of: Callable[[str], Containers]) -> Containers:
    return containers_of("runc")


@pytest.fixture
def under_gvisor(containers_of: Callable[[str], Containers]) -> Containers:
    return containers_of("runsc")


@pytest.fixture(params=["runc", "runsc"])
def containers(
    request: pytest.FixtureRequest, containers_of: Callable[[str], Containers]
) -> Containers:
    """Each test twice: under runc and under gVisor."""
    return containers_of(request.param)


class PrivateEngine:
    """A Docker engine for tests, which may stop and start it. It has one small image."""

    def __init__(self, folder: Path, runtimes: dict[str, Any] | None = None) -> None:
        self.folder = folder
        # A socket's path has to be short.
        self.url = f"unix://{folder}/s"
        self._process: subprocess.Popen[bytes] | None = None
        self._configure(runtimes or {})

    def _configure(self, runtimes: dict[str, Any]) -> None:
        (self.folder / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))

    def start(self) -> None:
        folder = self.folder
        (folder / "pid").unlink(missing_ok=True)
        command = [
            *("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
            *("--host", self.url, "--pidfile", f"{folder}/pid", "--bridge=none"),
            *("--config-file", f"{folder}/daemon.json", "--iptables=false", "--ip6tables=false"),
        ]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except (docker.errors.DockerException, requests.RequestException):
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            with self.client() as client:
                running = [one.attrs["State"]["Pid"] for one in client.containers.list()]
            self._process.terminate()
            for pid in running:
                # The engine would wait 10 s for what does not end when it is told to.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def register(self, runtimes: dict[str, Any]) -> None:
        """Have these runtimes beside runc, without a new start."""
        self._configure(runtimes)
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)
        with self.client() as client:
            wait_until(lambda: runtimes.keys() == _added(client.info()["Runtimes"]), seconds=60)

    @contextmanager
    def client(self) -> Iterator[docker.DockerClient]:
        client = docker.DockerClient(base_url=self.url, timeout=60)
        try:
            yield client
        finally:
            client.close()

    def install_small_image(self) -> None:
        with self.client() as client:
            client.api.import_image_from_data(
                small_root(), repository=SMALL_IMAGE, tag="latest", changes=[]
            )


def _added(runtimes: dict[str, Any]) -> set[str]:
    return runtimes.keys() - {"runc", "io.containerd.runc.v2"}


@pytest.fixture(scope="module")
def private_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEngine]:
    """A running engine that has runc only, for a module's tests; each leaves it so."""
    require("dockerd")
    if os.geteuid() != 0:
        missing("an engine of one's own needs root")
    folder = tmp_path_factory.mktemp("e")
    private = PrivateEngine(folder)
    private.start()
    private.install_small_image()
    try:
        yield private
    finally:
        private.stop()
        # What the engine has mounted below would keep pytest from removing the folder.
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def small_root() -> bytes:
    """A tar of this machine's Python and shell with the libraries they need, and nothing else."""
    python = os.path.realpath("/usr/bin/python3")
    version = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    library = Path(f"/usr/lib/python{version}")
    wanted = [Path(python), Path("/bin/bash"), *(library / "lib-dynload").iterdir()]
    needed: set[str] = set()
    for path in wanted:
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
        needed |= set(re.findall(r"(/\S+)", listed))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for file in sorted(needed | {"/bin/bash"}):
            archive.add(file, arcname=file)
        archive.add(python, arcname="/usr/bin/python3")
        for path in sorted(library.rglob("*")):
            if path.is_file() and not {"test", "idlelib", "tkinter"} & set(path.parts):
                archive.add(path, arcname=str(path), recursive=False)
    return buffer.getvalue()


class EngineProxy:
    """A socket before an engine. `on_create` sees each request for a container first.

    It may sleep, or return the response that the engine is not asked for.
    """

    def __init__(self, folder: Path, engine_url: str) -> None:
        self.url = f"unix://{folder}/proxy"
        self.on_create: Callable[[], bytes | None] = lambda: None
        self.created = 0
        self.requests = 0
        self._engine = engine_url.removeprefix("unix://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/proxy")
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        engine = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            engine.connect(self._engine)
            threading.Thread(target=_copy, args=(engine, end), daemon=True).start()
            while data := end.recv(1 << 16):
                self.requests += len(re.findall(rb"^(?:GET|POST|DELETE) /", data))
                if b"/containers/create" in data:
                    self.created += 1
                    if (refusal := self.on_create()) is not None:
                        end.sendall(refusal)
                        break
                engine.sendall(data)
            else:
                # The client has finished writing; what the engine still says goes through.
                engine.shutdown(socket.SHUT_WR)
                return
        for each in (end, engine):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def refusal(status: str, message: str) -> bytes:
    """A response as the engine gives it."""
    body = json.dumps({"message": message}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.fixture
def proxy(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProxy]:
    """A proxy before the shared engine."""
    made = EngineProxy(tmp_path_factory.mktemp("p"), os.environ["DOCKER_HOST"])
    yield made
    made.close()


async def eventually(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until it is so, without blocking the loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.02)
