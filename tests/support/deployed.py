"""What deploy/ says, started: the units of a host, and our services of the compose file.

Commands, their order and their environment are read from the files. Folders and ports are a test's
own, and the database is SQLite: the servers beside ours are others' to start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import NO_DOCKER, ROOT, Service, clean_environment, started

DEPLOY = ROOT / "deploy"
SYSTEMD = DEPLOY / "systemd"
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@dataclass(frozen=True)
class Part:
    """A service: what is run before it, and waited for, what it is, and with which variables."""

    name: str
    before: list[list[str]]
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    after: list[str]


def units_of_target(folder: Path, port: int) -> list[Part]:
    """What cofferdam.target starts on a host that was set up in `folder`, in order."""
    subprocess.run([DEPLOY / "make-secrets", folder / "etc/secrets", str(os.getgid())], check=True)
    places = {
        "/opt/cofferdam": str(ROOT),
        "/etc/cofferdam": str(folder / "etc"),
        "/var/lib/cofferdam": str(folder / "data"),
        "PORT=8000": f"PORT={port}",
    }

    def read(path: Path) -> str:
        text = path.read_text()
        for there, here in places.items():
            text = text.replace(there, here)
        return text

    (folder / "etc/cofferdam.env").write_text(read(DEPLOY / "cofferdam.env"))
    (wanted,) = _values((SYSTEMD / "cofferdam.target").read_text(), "Wants")
    parts = []
    for name in wanted.split():
        unit = read(SYSTEMD / name)
        (file,) = _values(unit, "EnvironmentFile")
        named = dict(line.split("=", 1) for line in _lines(Path(file).read_text()))
        (command,) = _values(unit, "ExecStart")
        before = [shlex.split(line) for line in _values(unit, "ExecStartPre")]
        after = " ".join(_values(unit, "After")).split()
        parts.append(Part(name, before, shlex.split(command), _beside(named, ROOT), after))
    return _in_order(parts)


def services_of_compose(folder: Path, port: int, pool_port: int) -> list[Part]:
    """Our services of compose.yaml, in order. `pool` is a name of this machine (`as_in_compose`)."""
    secrets = folder / "secrets"
    subprocess.run([DEPLOY / "make-secrets", secrets, str(os.getgid())], check=True)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    image = dict(re.findall(r"(\w+)=(\S+)", _last(r"^ENV (.+)$", "Containerfile")))
    parts = []
    for name in ("setup", "web", "worker", "pool"):
        service = compose["services"][name]
        named = image | service["environment"]
        for other in [
            each for each in named if each.startswith(("DATABASE_", "REDIS_", "STORAGE_"))
        ]:
            del named[other]
        named |= {"Q_BROKER": "orm", "PORT": str(port), "POOL_PORT": str(pool_port)}
        if "TRUSTED_PROXIES" in named:
            named["TRUSTED_PROXIES"] = "127.0.0.1"
        named["DATA_DIR"] = str(folder / service["volumes"][-1].partition(":")[0])
        if "DOCKER_HOST" in named:
            named["DOCKER_HOST"] = os.environ.get("DOCKER_HOST", NO_DOCKER)
        variables = {
            key: _interpolated(str(value))
            .replace("/run/secrets", str(secrets))
            .replace("9385", str(pool_port))
            for key, value in named.items()
        }
        command = [str(DEPLOY / "entrypoint"), *service["command"]]
        after = list(service.get("depends_on", {}))
        environment = _beside(variables, ROOT)
        if service.get("restart") == "no":
            parts.append(Part(name, [command], [], environment, after))
        else:
            parts.append(Part(name, [], command, environment, after))
    return _in_order(parts)


def as_in_compose(folder: Path, command: list[str]) -> list[str]:
    """The same command where the name `pool` is this machine. Needs root."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost pool\n::1 localhost\n")
    script = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
    return ["unshare", "--mount", "sh", "-ec", script, "sh", str(hosts), *command]


@contextmanager
def running(
    parts: list[Part], folder: Path, wrap: Any = lambda command: command
) -> Iterator[dict[str, Service]]:
    """All of them, started one behind the other; they end in the other order."""
    services = {}
    with ExitStack() as stack:
        for part in parts:
            environment = {"PORT": "0"} | part.environment
            for command in part.before:
                subprocess.run(wrap(command), env=environment, cwd=ROOT, check=True)
            if not part.command:
                continue
            log = folder / f"{part.name}.log"
            services[part.name] = stack.enter_context(
                started(wrap(part.command), environment, ROOT, log)
            )
        yield services


def _in_order(parts: list[Part]) -> list[Part]:
    """By what each says that it comes after; an order that contradicts itself fails."""
    left, ordered = list(parts), []
    while left:
        names = {part.name for part in left}
        ready = [part for part in left if not names & set(part.after)]
        assert ready, f"each waits for another: {names}"
        ordered += ready
        left = [part for part in left if part not in ready]
    return ordered


def _beside(named: Mapping[str, str], root: Path) -> dict[str, str]:
    """What a unit's process has: the variables of its file, and where programs are."""
    kept = clean_environment(Path("unused"))
    del kept["DATA_DIR"]
    return kept | {"COFFERDAM": str(root)} | dict(named)


def _values(unit: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.+)$", unit, re.M)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _last(pattern: str, name: str) -> str:
    found: str = re.findall(pattern, (DEPLOY / name).read_text(), re.M)[-1]
    return found


def _interpolated(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        return os.environ.get(match[1]) or (match[3] if match[2] == "-" else "")

    return _VARIABLE.sub(value, text)
