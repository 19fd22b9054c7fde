"""The bundle installs, and carries out an audited run, on a machine that has no network."""

from __future__ import annotations

import ensurepip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.required import missing, require
from tests.support.site import migrated

BUILD = str(ROOT / "bundle" / "build.py")
NOWHERE = "unix:///nowhere/docker.sock"
# Of the issue: from the unpacked archive to the answer of the first audited run.
MOST_SECONDS = 300


def build(output: Path, wheels: Path, packages: Path | None = None) -> Path:
    command = [sys.executable, BUILD, "--output", str(output), "--wheels", str(wheels)]
    command += ["--packages", str(packages)] if packages else ["--without-packages"]
    made = subprocess.run(
        [*command, "--without-images"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


@pytest.fixture(scope="module")
def committed() -> None:
    require("git")
    require("apt-get")
    if not (ROOT / ".git").exists():
        missing("a bundle is made of a commit, and this is no checkout")


@pytest.fixture(scope="module")
def wheels(committed: None) -> Path:
    """Those of the lock, built once and kept beside pip's own cache."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--use-pep517", "--no-deps"]
    return kept(ROOT / "requirements.txt", pip, "pip")


@pytest.fixture(scope="module")
def packages(committed: None) -> Path:
    """Those that Python programs import."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--only-binary", ":all:", "--no-deps"]
    return kept(ROOT / "providers" / "local" / "packages.txt", pip)


def kept(lock: Path, pip: list[str], *others: str) -> Path:
    """The wheels that a lock names, and others, made by this command once per lock."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cofferdam"
    folder = cache / f"wheels-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        for what in (["--require-hashes", "-r", str(lock)], *([each] for each in others)):
            subprocess.run([*pip, "--wheel-dir", str(draft), *what], check=True)
        draft.rename(folder)
    return folder


@pytest.fixture(scope="module")
def few_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pip, as Python brings it, and one that leads to the packages of the environment here."""
    folder = tmp_path_factory.mktemp("wheels")
    of_debian = Path("/usr/share/python-wheels").glob("pip-*.whl")
    of_python = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    if not (found := [*of_debian, *of_python]):
        missing("Python brings no wheel of pip: python3-venv is not installed")
    shutil.copy(found[0], folder)
    name = "packages_here-1.0"
    files = {
        "packages_here.pth": f"{sysconfig.get_path('purelib')}\n",
        f"{name}.dist-info/METADATA": "Metadata-Version: 2.1\nName: packages-here\nVersion: 1.0\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{name}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return folder


@pytest.fixture(scope="module")
def small(committed: None, few_wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with these wheels."""
    return build(tmp_path_factory.mktemp("small"), few_wheels)


def test_the_same_commit_makes_the_same_bytes(
    small: Path, few_wheels: Path, tmp_path: Path
) -> None:
    archive = build(tmp_path, few_wheels)
    digests = {hashlib.sha256(each.read_bytes()).hexdigest() for each in (archive, small)}
    assert len(digests) == 1
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
        found = {member.name.partition("/")[2] for member in members}
        sums = packed.extractfile(f"{members[0].name}/SHA256SUMS")
        assert sums is not None
        summed = {line.split(maxsplit=1)[1] for line in sums.read().decode().splitlines()}
        for member in members:
            assert (member.uid, member.uname) == (0, "")
    assert {"install.sh", "project/manage.py", "project/requirements.txt"} <= found
    assert not {name for name in found if name.startswith(("project/.git/", "project/var/"))}
    # A link is summed by what it leads to.
    files = {
        member.name.partition("/")[2] for member in members if member.isfile() or member.issym()
    }
    assert files == summed | {"SHA256SUMS"}
    debs = [name for name in found if re.fullmatch(r"debian/bubblewrap_.*\.deb", name)]
    assert len(debs) == 1


def test_what_was_altered_or_made_for_another_machine_is_not_installed(
    small: Path, tmp_path: Path
) -> None:
    folder = unpacked(small, tmp_path)
    target = tmp_path / "target"

    def install() -> subprocess.CompletedProcess[str]:
        command = ["sh", str(folder / "install.sh"), str(target)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    wheel = next((folder / "wheels").iterdir())
    content = wheel.read_bytes()
    wheel.write_bytes(b"another wheel")
    refused = install()
    assert refused.returncode == 1
    assert "damaged" in refused.stderr
    wheel.write_bytes(content)
    made_for = folder / "made-for.json"
    text = made_for.read_text()
    made_for.write_text(text.replace('"machine": "', '"machine": "another-'))
    sums = folder / "SHA256SUMS"
    digests = [hashlib.sha256(each.encode()).hexdigest() for each in (text, made_for.read_text())]
    sums.write_text(sums.read_text().replace(*digests))
    refused = install()
    assert refused.returncode == 1
    assert "made for another machine: machine another-" in refused.stderr
    assert not target.exists()


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    return folder / archive.name.removesuffix(".tar")


def install_without_network(archive: Path, tmp_path: Path, imported: str = "json") -> None:
    """Install it, and carry out an audited run, in a network namespace of its own."""
    require("bwrap")
    unshare = require("unshare")
    folder = unpacked(archive, tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    migrated(tmp_path / "data")
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
    alone = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    done = subprocess.run(
        [
            unshare,
            *alone,
            sys.executable,
            "-m",
            "tests.support.offline_machine",
            str(folder),
            str(tmp_path),
            imported,
        ],
        env=environment
        | {"PYTHONPATH": str(ROOT), "DOCKER_HOST": NOWHERE, "DATA_DIR": str(tmp_path / "data")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["interfaces"] == ["lo"]
    # Not even tried.
    assert told["without_route"] == 0
    assert told["outside"] == []
    assert (told["status"], told["stdout"]) == ("succeeded", "42\n")
    assert told["ledger"].startswith("Intact: ")
    assert told["seconds"]["all"] < MOST_SECONDS, told["seconds"]
    print(told["seconds"])


def test_it_installs_and_runs_code_where_there_is_no_network(small: Path, tmp_path: Path) -> None:
    install_without_network(small, tmp_path)


@pytest.mark.slow
def test_the_wheels_of_the_locks_are_all_that_it_needs(wheels: Path, packages: Path) -> None:
    # Sandboxes have a /tmp of their own, so the packages must lie elsewhere.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        install_without_network(build(folder, wheels, packages), folder, imported="pandas")
