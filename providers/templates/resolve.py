"""The program that resolves a declaration to a lock. It runs in a sandbox, as all code does.

What it reads of an index may be anything: it decides which files are named, and the lock names each
with its hash. Source distributions are refused, as even their metadata is code that runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from providers.errors import InvalidConfiguration
from providers.templates import yanked
from providers.templates.base import OWN, Base
from providers.templates.declaration import Declaration
from providers.values import InputFile

PYTHON_LOCK, NPM_LOCK, APT_LOCK = "pylock.toml", "package-lock.json", "apt.txt"
WORKSPACE_ARCHIVE = "workspace.tar.gz"

# The index of Python packages, and the hosts that its files lie on.
PYPI = "https://pypi.org/simple"
NPM = "https://registry.npmjs.org"
_FILE_HOSTS = {"pypi.org": ("files.pythonhosted.org",)}

_REQUIREMENTS, _PACKAGE = "requirements.in", "package.json"
# Releases of glibc 2 that uv can resolve for.
_MANYLINUX = (17, 28, *range(31, 41))
_MOST_SOURCES = 20


@dataclass(frozen=True)
class ResolveJob:
    """What is run: Python code, its input files, and the network rules that it needs."""

    code: str
    files: tuple[InputFile, ...]
    rules: tuple[str, ...]


def job_for(
    declaration: Declaration, index_url: str = PYPI, npm_registry: str = NPM, base: Base = OWN
) -> ResolveJob:
    """Return the job whose artifacts are the locks of a declaration, but for apt's.

    Raises InvalidConfiguration for packages of Python where the base has no Python of use.
    """
    files, hosts, steps, after = [], list[str](), [], ""
    if declaration.python:
        files.append(InputFile(_REQUIREMENTS, "\n".join(declaration.python).encode()))
        hosts += hosts_of(index_url)
        # What it builds for the names of dependencies runs here.
        builds = [option for name in declaration.build for option in ("--no-binary", name)]
        steps.append(
            ["uv", "pip", "compile", _REQUIREMENTS, "--format", "pylock.toml", "--no-header",
             "--only-binary", ":all:", *builds, "--index-url", index_url, "--no-config",
             "--no-cache", "--no-python-downloads", "--output-file", f"artifacts/{PYTHON_LOCK}",
             *_target(base)]
        )  # fmt: skip
        after = yanked.program(f"artifacts/{PYTHON_LOCK}", index_url)
    if declaration.npm:
        wanted = dict(_npm_range(each) for each in declaration.npm)
        described = {"name": "template", "version": "1.0.0", "dependencies": wanted}
        files.append(InputFile(_PACKAGE, json.dumps(described).encode()))
        hosts += hosts_of(npm_registry)
        steps.append(
            ["npm", "install", "--package-lock-only", "--ignore-scripts", "--no-audit", "--no-fund",
             "--no-update-notifier", "--omit=dev", "--registry", npm_registry]
        )  # fmt: skip
    code = _PROGRAM.replace("STEPS", repr(steps)).replace("NPM_LOCK", repr(NPM_LOCK))
    return ResolveJob(code + after, tuple(files), tuple(dict.fromkeys(hosts)))


def _target(base: Base) -> list[str]:
    """The options by which uv resolves for another Python than its own."""
    if not base.kind:
        return []
    if not base.release:
        raise InvalidConfiguration(
            f"base: {base.name} has no python3 of 3.9 or newer, for which packages could be "
            "chosen.",
            field="base",
        )
    options = ["--python-version", base.release]
    if base.kind == "image":
        options += ["--python-platform", _platform(base)]
    return options


def _platform(base: Base) -> str:
    """What uv calls the platform of an image."""
    name, _, release = base.libc.partition(" ")
    if name == "musl":
        return f"{base.machine}-unknown-linux-musl"
    minor = int(release.rpartition(".")[2] or 0)
    known = [each for each in _MANYLINUX if each <= minor]
    if not known:
        raise InvalidConfiguration(
            f"base: {base.name} has no glibc of 2.17 or newer and no musl, for which there are "
            "wheels.",
            field="base",
        )
    return f"{base.machine}-manylinux_2_{known[-1]}"


@dataclass(frozen=True)
class Facts:
    """What an image says of itself. `sources` are the addresses of its apt sources."""

    base: Base
    has_apt: bool
    sources: tuple[str, ...]


def facts_job() -> ResolveJob:
    """Return the job that tells what an image is. `read_facts` reads what it prints."""
    return ResolveJob(_FACTS, (), ())


def read_facts(name: str, image: str, printed: str) -> Facts:
    """Read what the job of `facts_job` has printed in the image of this digest.

    Raises InvalidConfiguration with field base.
    """
    try:
        said: dict[str, Any] = json.loads(printed)
        sources = [each for each in said["sources"] if urlsplit(each).hostname]
        base = Base.from_json({**said["base"], "name": name, "image": image, "look": ""})
        return Facts(base, said["has_apt"] is True, tuple(sources[:_MOST_SOURCES]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidConfiguration(
            f"base: What {name[:80]} says of itself cannot be read.", field="base"
        ) from None


def apt_job(declaration: Declaration, facts: Facts) -> ResolveJob:
    """Return the job whose artifact is the lock of packages of Debian. It runs in the base itself.

    Raises InvalidConfiguration where that has no apt, or no sources.
    """
    if not facts.has_apt:
        raise InvalidConfiguration(
            f"apt: {facts.base.name} has no apt-get and dpkg. Name an image of Debian or Ubuntu.",
            field="apt",
        )
    if not facts.sources:
        raise InvalidConfiguration(
            f"apt: {facts.base.name} has no sources of packages in /etc/apt. Add them to it.",
            field="apt",
        )
    code = _APT.replace("PACKAGES", repr(list(declaration.apt))).replace("LOCK", repr(APT_LOCK))
    rules = (rule for each in facts.sources for rule in hosts_of(each))
    return ResolveJob(code, (), tuple(dict.fromkeys(rules)))


def commands_for(declaration: Declaration) -> ResolveJob:
    """Return the job that runs a declaration's commands. Its artifact is the workspace."""
    files = tuple(InputFile(path, content) for path, content in declaration.files.items())
    code = _COMMANDS.replace("COMMANDS", repr(list(declaration.run)))
    return ResolveJob(code.replace("ARCHIVE", repr(WORKSPACE_ARCHIVE)), files, ())


def registry_variables(index_url: str, npm_registry: str) -> dict[str, str]:
    """Return the variables by which installers find registries other than the usual ones."""
    found = {}
    if index_url != PYPI:
        found = {"PIP_INDEX_URL": index_url, "UV_DEFAULT_INDEX": index_url}
        address = urlsplit(index_url)
        if address.scheme == "http" and address.hostname:
            found["PIP_TRUSTED_HOST"] = address.hostname
    return found if npm_registry == NPM else {**found, "npm_config_registry": npm_registry}


def hosts_of(index_url: str) -> list[str]:
    """Return the rules of a network list that let the index and its files through."""
    address = urlsplit(index_url)
    host = address.hostname or ""
    port = f":{address.port}" if address.port else ""
    return [f"{host}{port}", *_FILE_HOSTS.get(host, ())]


def _npm_range(package: str) -> tuple[str, str]:
    """Return name and range of `@scope/name@range`."""
    name, at, wanted = package[1:].partition("@")
    return package[0] + name, wanted if at else "*"


_COMMANDS = """\
import os, subprocess, sys, tarfile

for number, command in enumerate(COMMANDS, 1):
    print(f"[{number}] $ {command}", flush=True)
    done = subprocess.run(["/bin/sh", "-c", command])
    if done.returncode:
        sys.exit(f"Step {number} ended with exit code {done.returncode}: {command}")
with tarfile.open("/tmp/" + ARCHIVE, "w:gz") as archive:
    for name in sorted(os.listdir(".")):
        if name != "artifacts":
            archive.add(name)
os.makedirs("artifacts", exist_ok=True)
with open("/tmp/" + ARCHIVE, "rb") as packed, open("artifacts/" + ARCHIVE, "wb") as left:
    left.write(packed.read())
"""

_FACTS = """\
import glob, json, os, platform, re, shutil, subprocess, sys

try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError):
    libc = ""
for loader in glob.glob("/lib/ld-musl-*.so.1") if not libc else ():
    said = subprocess.run([loader], capture_output=True, text=True).stderr
    found = re.search(r"Version ([0-9]+[.][0-9]+)", said)
    libc = f"musl {found[1]}" if found else ""
sources = set()
for path in ["/etc/apt/sources.list", *glob.glob("/etc/apt/sources.list.d/*")]:
    if os.path.isfile(path):
        for line in open(path, errors="replace"):
            if not line.lstrip().startswith("#"):
                sources.update(re.findall(r"https?://[^\\s/]+", line))
interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
release = "%d.%d" % sys.version_info[:2]
base = {"python": release, "interpreter": interpreter, "libc": libc, "machine": platform.machine()}
has_apt = all(map(shutil.which, ("apt-get", "dpkg")))
print(json.dumps({"base": base, "has_apt": has_apt, "sources": sorted(sources)}))
"""

# As a user without rights: apt's own folders are others, and nothing is installed.
_APT = """\
import os, subprocess, sys

folder = "/tmp/apt"
options = []
for name in ("lists/partial", "cache/archives/partial"):
    os.makedirs(f"{folder}/{name}", exist_ok=True)
settings = {
    "Dir::State::lists": f"{folder}/lists",
    "Dir::State::status": "/var/lib/dpkg/status",
    "Dir::State::extended_states": f"{folder}/extended_states",
    "Dir::Cache": f"{folder}/cache",
    "Dir::Log": folder,
    "Debug::NoLocking": "1",
    "APT::Sandbox::User": "",
    "APT::Update::Error-Mode": "any",
    "Acquire::Languages": "none",
    # Or it may print an address without one.
    "Acquire::ForceHash": "SHA256",
    "Acquire::Retries": "2",
}
for kind in ("http", "https"):
    if proxy := os.environ.get(f"{kind.upper()}_PROXY"):
        settings[f"Acquire::{kind}::Proxy"] = proxy
if trusted := os.environ.get("SSL_CERT_FILE"):
    settings["Acquire::https::CaInfo"] = trusted
for name, value in settings.items():
    options += ["-o", f"{name}={value}"]
for command in (["update"], ["install", "--print-uris", "--yes", "--no-install-recommends",
                             "-qq", *PACKAGES]):
    print("$ apt-get", *command, flush=True)
    done = subprocess.run(["apt-get", *options, *command], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(done.returncode)
os.makedirs("artifacts", exist_ok=True)
with open("artifacts/" + LOCK, "w") as lock:
    lock.write("".join(f"{line}\\n" for line in done.stdout.splitlines() if line.startswith("'")))
"""

_PROGRAM = """\
import importlib.util, os, shutil, subprocess, sys

os.makedirs("artifacts", exist_ok=True)
# A sandbox has few threads.
os.environ.update(TOKIO_WORKER_THREADS="2", RAYON_NUM_THREADS="2")
for name, *options in STEPS:
    program = shutil.which(name)
    if program is None and not importlib.util.find_spec(name):
        sys.exit(f"The sandbox has no {name}: `manage.py packages` installs it.")
    print("$", name, *options, flush=True)
    command = [program] if program else [sys.executable, "-m", name]
    done = subprocess.run([*command, *options])
    if done.returncode:
        sys.exit(done.returncode)
if os.path.exists(NPM_LOCK):
    shutil.move(NPM_LOCK, "artifacts")
"""
