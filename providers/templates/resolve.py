"""The program that resolves a declaration to a lock. It runs in a sandbox, as all code does.

What it reads of an index may be anything: it decides which files are named, and the lock names each
with its hash. Source distributions are refused, as even their metadata is code that runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from providers.templates import yanked
from providers.templates.declaration import Declaration
from providers.values import InputFile

PYTHON_LOCK, NPM_LOCK = "pylock.toml", "package-lock.json"
WORKSPACE_ARCHIVE = "workspace.tar.gz"

# The index of Python packages, and the hosts that its files lie on.
PYPI = "https://pypi.org/simple"
NPM = "https://registry.npmjs.org"
_FILE_HOSTS = {"pypi.org": ("files.pythonhosted.org",)}

_REQUIREMENTS, _PACKAGE = "requirements.in", "package.json"


@dataclass(frozen=True)
class ResolveJob:
    """What is run: Python code, its input files, and the network rules that it needs."""

    code: str
    files: tuple[InputFile, ...]
    rules: tuple[str, ...]


def job_for(declaration: Declaration, index_url: str = PYPI, npm_registry: str = NPM) -> ResolveJob:
    """Return the job whose artifacts are the locks of a declaration."""
    files, hosts, steps, after = [], list[str](), [], ""
    if declaration.python:
        files.append(InputFile(_REQUIREMENTS, "\n".join(declaration.python).encode()))
        hosts += hosts_of(index_url)
        # What it builds for the names of dependencies runs here.
        builds = [option for name in declaration.build for option in ("--no-binary", name)]
        steps.append(
            ["uv", "pip", "compile", _REQUIREMENTS, "--format", "pylock.toml", "--no-header",
             "--only-binary", ":all:", *builds, "--index-url", index_url, "--no-config",
             "--no-cache", "--no-python-downloads", "--output-file", f"artifacts/{PYTHON_LOCK}"]
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
