"""The few calls to a Docker engine that the launcher needs, all of which block, and the frames of a
container's attach stream (8 bytes before each piece: stream and size).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env

from providers.errors import CreationFailed, ProviderUnavailable, SandboxError
from providers.runtime.launchers.container_guest import DEFAULT_IMAGES
from providers.runtime.pool.hardening import Hardening
from providers.runtime.pool.state_store import StateStore

# How long the engine may take to know how a container ended, and the exit code of one that was
# killed, which is for memory unless somebody else did it.
END_SECONDS = 1.0
_KILLED = 137

# No answer in this time counts as a refusal. A container takes 0.3 s, on a busy engine 3.
CALL_SECONDS = 25
# Of giving an image files, which may be many.
FILES_SECONDS = 600

PARALLEL_CALLS = 16

REMEDY = "Start the Docker engine, or point DOCKER_HOST to one that this user may use."


@dataclass(frozen=True)
class Listed:
    """One entry of the engine's list of containers. `created` is a Unix time."""

    id: str
    name: str
    labels: dict[str, str]
    created: float
    is_running: bool = True


@dataclass(frozen=True)
class Started:
    """A running container: its attach stream, its first process as the host sees it, and what the
    engine says of how it was made."""

    id: str
    stream: socket.socket
    pid: int
    shape: Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """How a container ended, as the engine has it. No exit code: it does not know that it has."""

    out_of_memory: bool = False
    exit_code: int | None = None


@dataclass(frozen=True)
class Recipe:
    """What a container is made from. `settings` and `host` are as the engine takes them.

    With `ends_with_stream` its standard input ends with the first stream that it is attached to.
    """

    image: str
    command: list[str]
    settings: Mapping[str, Any]
    host: Mapping[str, Any]
    labels: Mapping[str, str]
    ends_with_stream: bool = False


class Engine:
    """A connection to one engine, for any number of threads."""

    def __init__(self, base_url: str | None = None) -> None:
        """`base_url` is what DOCKER_HOST takes; None is DOCKER_HOST or the usual socket."""
        self._base_url = base_url
        self._client: docker.APIClient | None = None
        self._lock = threading.Lock()

    def info(self) -> dict[str, Any]:
        """The engine's description of itself. Raises ProviderUnavailable, with the remedy."""
        try:
            answer: dict[str, Any] = self._api().info()
        except (DockerException, requests.RequestException, OSError) as error:
            raise ProviderUnavailable(
                f"The Docker engine does not answer: {error}. {REMEDY}"
            ) from error
        return answer

    def image(self, name: str) -> dict[str, Any] | None:
        """The engine's description of an image, None when there is none of that name."""
        with told_as(ProviderUnavailable):
            try:
                answer: dict[str, Any] = self._api().inspect_image(name)  # type: ignore[no-untyped-call]
            except ImageNotFound:
                return None
        return answer

    def start(self, name: str, recipe: Recipe) -> Started:
        """Create, attach to and start a container. Raises CreationFailed; then nothing is left."""
        with told_as(CreationFailed):
            api = self._api()
            created = api.create_container(
                recipe.image,
                name=name,
                # As the entry point, so that nothing of the image's own is put before or after it.
                entrypoint=recipe.command,
                stdin_open=True,
                detach=not recipe.ends_with_stream,
                healthcheck={"test": ["NONE"]},
                host_config=dict(recipe.host),
                labels=dict(recipe.labels),
                **recipe.settings,
            )
            identifier: str = created["Id"]
            try:
                # Before the start, so that no output is missed.
                stream = self._attach(identifier)
                try:
                    api.start(identifier)
                    inspected = api.inspect_container(identifier)
                except BaseException:
                    stream.close()
                    raise
            except BaseException:
                with contextlib.suppress(SandboxError):
                    self.remove(identifier)
                raise
        return Started(identifier, stream, inspected["State"]["Pid"], shape_of(inspected))

    def inspect(self, identifier: str) -> dict[str, Any] | None:
        """The engine's description of a container, None when there is none."""
        with told_as(ProviderUnavailable):
            try:
                answer: dict[str, Any] = self._api().inspect_container(identifier)
            except NotFound:
                return None
        return answer

    def attach(self, inspected: Mapping[str, Any]) -> Started:
        """Attach to a running container, as the engine described it. Raises ProviderUnavailable."""
        identifier = inspected["Id"]
        with told_as(ProviderUnavailable):
            stream = self._attach(identifier)
        return Started(identifier, stream, inspected["State"]["Pid"], shape_of(inspected))

    def rename(self, identifier: str, name: str) -> None:
        """Raises ProviderUnavailable."""
        with told_as(ProviderUnavailable):
            self._api().rename(identifier, name)

    def run_once(self, name: str, recipe: Recipe, stdin: bytes) -> bytes:
        """What a container prints that is given `stdin` and then ends.

        Raises CreationFailed, with what it complained of when it printed nothing.
        """
        started = self.start(name, recipe)
        try:
            stream = started.stream
            stream.settimeout(CALL_SECONDS)
            demultiplexer = Demultiplexer()
            output = b""
            with told_as(CreationFailed):
                stream.sendall(stdin)
                stream.shutdown(socket.SHUT_WR)
                while data := stream.recv(1 << 16):
                    output += demultiplexer.feed(data)
            if not output:
                raise CreationFailed(demultiplexer.complaint or "the container printed nothing")
            return output
        finally:
            started.stream.close()
            self.remove(started.id)

    def runtime(self, identifier: str) -> str:
        """The runtime a container was made with."""
        with told_as(CreationFailed):
            found: str = self._api().inspect_container(identifier)["HostConfig"]["Runtime"]
        return found

    def end_of(self, identifier: str) -> End:
        """How a container of ours ended that has just closed its stream.

        The engine notes the end a moment after it, and that memory was the reason as late again.
        """
        deadline = time.monotonic() + END_SECONDS
        while True:
            with told_as(ProviderUnavailable):
                try:
                    state = self._api().inspect_container(identifier)["State"]
                except NotFound:
                    return End()
            ended = not state.get("Running")
            end = End(bool(state.get("OOMKilled")), int(state.get("ExitCode", 0)))
            if ended and (end.out_of_memory or end.exit_code != _KILLED):
                return end
            if time.monotonic() > deadline:
                return end if ended else End()
            time.sleep(0.02)

    def add_files(
        self, base: str, archive: Iterator[bytes], name: str, labels: Mapping[str, str], tag: str
    ) -> str:
        """Make an image of another one and the files of a tar archive; return its id.

        `name` and `labels` are of the container that is made for it. Raises CreationFailed.
        """
        with told_as(CreationFailed), contextlib.closing(self.client(FILES_SECONDS)) as api:
            created = api.create_container(
                base, name=name, entrypoint=["true"], labels=dict(labels)
            )
            try:
                api.put_archive(created["Id"], "/", archive)
                return _commit(api, created["Id"], labels, tag)
            finally:
                api.remove_container(created["Id"], force=True, v=True)

    def commit(self, identifier: str, labels: Mapping[str, str], tag: str) -> str:
        """Make an image of a container that has these labels; return its id. Raises
        CreationFailed."""
        with told_as(CreationFailed), contextlib.closing(self.client(FILES_SECONDS)) as api:
            return _commit(api, identifier, labels, tag)

    def listen(self, identifier: str) -> socket.socket:
        """Attach to what a container says that is not started yet. Raises CreationFailed."""
        with told_as(CreationFailed):
            return self._attach(identifier, stdin=0)

    def start_made(self, identifier: str) -> None:
        """Start a container that was made. Raises CreationFailed."""
        with told_as(CreationFailed):
            self._api().start(identifier)

    def written_bytes(self, identifier: str) -> int:
        """Return how much a container has written in its root. Raises ProviderUnavailable."""
        with told_as(ProviderUnavailable):
            found = self._api().containers(all=True, size=True, filters={"id": identifier})
        return max((int(each.get("SizeRw") or 0) for each in found), default=0)

    def remove_image(self, name: str) -> None:
        """Remove an image. One that is gone or in use is no error. Raises ProviderUnavailable."""
        with told_as(ProviderUnavailable):
            try:
                self._api().remove_image(name)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != 409:
                    raise

    def remove_images(self, start: str) -> None:
        """Remove the images whose name begins so. Raises ProviderUnavailable."""
        with told_as(ProviderUnavailable):
            found = self._api().images(filters={"reference": f"{start}*"})
        # An image that another one is made of goes after it.
        for image in sorted(found, key=lambda each: -each["Created"]):
            for name in image["RepoTags"] or ():
                if name.startswith(start):
                    self.remove_image(name)

    def remove(self, identifier: str) -> None:
        """End a container and remove it. One that is gone is no error."""
        with told_as(ProviderUnavailable):
            try:
                self._api().remove_container(identifier, force=True, v=True)
            except NotFound:
                return
            except APIError as error:
                # Somebody else is at it.
                if error.status_code != 409:
                    raise

    def containers(self, label: str) -> list[Listed]:
        """Every container with this label, whatever its state."""
        with told_as(ProviderUnavailable):
            found = self._api().containers(all=True, filters={"label": label})
        return [
            Listed(
                one["Id"],
                one["Names"][0].lstrip("/"),
                one["Labels"],
                one["Created"],
                one["State"] in ("running", "created"),
            )
            for one in found
        ]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _api(self) -> docker.APIClient:
        with self._lock:
            if self._client is None:
                self._client = self.client(CALL_SECONDS)
            return self._client

    def client(self, seconds: int) -> docker.APIClient:
        """Return another client of the engine, whose calls may take so long."""
        options: dict[str, Any] = {**kwargs_from_env()}
        if self._base_url:
            options = {"base_url": self._base_url}
        return docker.APIClient(
            **options, version="auto", timeout=seconds, max_pool_size=PARALLEL_CALLS
        )

    def _attach(self, identifier: str, stdin: int = 1) -> socket.socket:
        wanted = {"stdin": stdin, "stdout": 1, "stderr": 1, "stream": 1}
        attached: Any = self._api().attach_socket(identifier, params=wanted)
        raw = getattr(attached, "_sock", attached)
        if type(raw) is not socket.socket:
            raise DockerException(
                "containers can be attached to over unix:// and tcp:// without TLS only"
            )
        # A descriptor of our own: the response's is closed with the response.
        stream = socket.socket(fileno=raw.detach())
        stream.settimeout(CALL_SECONDS)
        return stream


def _commit(api: docker.APIClient, identifier: str, labels: Mapping[str, str], tag: str) -> str:
    # The labels of a container are of its image too.
    nothing = [f"LABEL {each}=" for each in labels]
    image: str = api.commit(identifier, repository=tag, changes=nothing)["Id"]
    return image


@contextlib.contextmanager
def told_as(kind: type[SandboxError]) -> Iterator[None]:
    """Turn whatever docker-py and its HTTP client raise into one of our errors."""
    try:
        yield
    except (DockerException, requests.RequestException, OSError) as error:
        reason = getattr(error, "explanation", None) or str(error) or type(error).__name__
        raise kind(f"Docker: {reason}") from error


STDERR = 2
COMPLAINT_BYTES = 2000
_HEADER_BYTES = 8


class Demultiplexer:
    """Takes the engine's headers off: stdout is passed on, the beginning of stderr is kept."""

    def __init__(self) -> None:
        self.stderr = b""
        self._header = b""
        self._left = 0
        self._stream = 0

    @property
    def complaint(self) -> str:
        """The beginning of what was written to stderr, as text."""
        return self.stderr.decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that is stdout."""
        out = []
        view = memoryview(data)
        while view:
            if self._left == 0:
                taken = _HEADER_BYTES - len(self._header)
                self._header += view[:taken]
                view = view[taken:]
                if len(self._header) < _HEADER_BYTES:
                    break
                self._stream = self._header[0]
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._stream != STDERR:
                out.append(piece)
            elif len(self.stderr) < COMPLAINT_BYTES:
                self.stderr += piece[: COMPLAINT_BYTES - len(self.stderr)]
        return b"".join(out)


GVISOR_REMEDY = (
    "Install gVisor's runsc, register it in the engine's daemon.json as the runtime `runsc` with "
    "the arguments --network=none and --platform=systrap, and restart the engine."
)


@dataclass(frozen=True)
class DockerSettings:
    """Which engine, what it starts, and who the containers belong to.

    `images` maps a language or a template's name to an image. `runtime` is the name of one of the
    engine's runtimes, or "auto": runsc where the engine has it and it works, else runc. Pools
    with different `pool_id`s never touch each other's containers. With a `memory` kept ones outlive
    this process. Without `filter_system_calls`
    only the engine's own seccomp profile holds.
    """

    base_url: str | None = None
    images: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_IMAGES))
    runtime: str = "auto"
    require_gvisor: bool = False
    filter_system_calls: bool = True
    pool_id: str = "default"
    memory: StateStore | None = None


# What of the engine's HostConfig says how much a container may do.
_HOST = (
    *("Runtime", "NetworkMode", "ReadonlyRootfs", "CapAdd", "CapDrop", "SecurityOpt", "Privileged"),
    *("IpcMode", "PidMode", "UTSMode", "UsernsMode", "CgroupnsMode", "CgroupParent", "GroupAdd"),
    *("Memory", "MemorySwap", "NanoCpus", "PidsLimit", "Ulimits", "ShmSize", "Sysctls", "Tmpfs"),
    *("Binds", "VolumesFrom", "Devices", "DeviceRequests", "DeviceCgroupRules", "PortBindings"),
)
_NEVER = ("Binds", "Devices", "DeviceRequests", "VolumesFrom", "PortBindings")
_CONFIG = ("User", "Env", "OpenStdin", "StdinOnce", "Tty", "WorkingDir", "Labels")


def shape_of(inspected: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, and without what is large: that as a digest."""
    config, host = inspected["Config"], inspected["HostConfig"]
    command = json.dumps([config.get("Entrypoint"), config.get("Cmd")]).encode()
    shape = {
        "Image": inspected["Image"],
        "Command": hashlib.sha256(command).hexdigest(),
        **{name: config.get(name) for name in _CONFIG},
        **{name: host.get(name) for name in _HOST},
        "Mounts": inspected.get("Mounts"),
        "Networks": sorted((inspected.get("NetworkSettings") or {}).get("Networks") or {}),
    }
    found: dict[str, Any] = json.loads(json.dumps(shape))
    return found


def differences(shape: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    names = sorted({*shape, *expected})
    return [name for name in names if shape.get(name) != expected.get(name)]


def weaknesses(shape: Mapping[str, Any], runtime: str) -> list[str]:
    """The names of what is weaker than every container of ours under `runtime` is."""
    settings = Hardening.of(runtime).settings
    expected = {
        "NetworkMode": settings["network_mode"],
        "Networks": [settings["network_mode"]],
        "ReadonlyRootfs": settings["read_only"],
        "Privileged": settings["privileged"],
        "IpcMode": settings["ipc_mode"],
        "CapDrop": settings["cap_drop"],
        "StdinOnce": False,
        "OpenStdin": True,
        "Mounts": [],
    }
    weak = [name for name, value in expected.items() if shape.get(name) != value]
    added = {name.removeprefix("CAP_") for name in shape.get("CapAdd") or []}
    if added - set(settings["cap_add"]):
        weak.append("CapAdd")
    if not set(settings["security_opt"]) <= set(shape.get("SecurityOpt") or []):
        weak.append("SecurityOpt")
    for name in ("Memory", "PidsLimit"):
        if not shape.get(name) or shape[name] < 0:
            weak.append(name)
    return weak + [name for name in _NEVER if shape.get(name)]
