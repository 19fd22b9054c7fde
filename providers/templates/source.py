"""Source distributions: built to wheels in a sandbox, one in each, as building runs their code.

Of the sandbox only the wheel is taken. It is unpacked as one of an index, and the lock has its hash
and that of the source.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    canonicalize_version,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion

from providers.templates.files import BuildFailed
from providers.templates.lock import BUILT, Lock, LockedPackage
from providers.templates.resolve import ResolveJob, hosts_of


def sources_of(lock: Lock) -> list[LockedPackage]:
    """Return the packages that have to be built, as their sources, also of a lock that names the
    wheels of an earlier build."""
    return [_source(each) for each in lock.packages if each.is_source or each.source_url]


def job_of(package: LockedPackage, index_url: str) -> ResolveJob:
    """Return the job that fetches a source, compares its hash, and builds it. Its artifact is the
    wheel."""
    given = (package.url, package.file_name, package.algorithm, package.hash, index_url)
    hosts = tuple(dict.fromkeys(hosts_of(index_url)))
    return ResolveJob(_PROGRAM.replace("GIVEN", repr(given)), (), hosts)


def built(package: LockedPackage, file_name: str, digest: str, size: int) -> LockedPackage:
    """Return the package as the wheel that was built of its source. `digest` is its SHA-256.

    Raises BuildFailed for a file that is no wheel of this package and version.
    """
    try:
        name, version, _, _ = parse_wheel_filename(file_name)
    except (InvalidWheelFilename, InvalidVersion):
        raise BuildFailed(f"{package.name}: What was built is no wheel.") from None
    if name != canonicalize_name(package.name) or canonicalize_version(
        version
    ) != canonicalize_version(package.version):
        raise BuildFailed(
            f"{package.name}: What was built is {file_name[:100]!r}, of another package or version."
        )
    return replace(
        package,
        url=f"{BUILT}{quote(file_name)}",
        algorithm="sha256",
        hash=digest,
        size=size,
        source_url=package.url,
        source_hash=f"{package.algorithm}:{package.hash}",
    )


def _source(package: LockedPackage) -> LockedPackage:
    if not package.source_url:
        return package
    algorithm, _, digest = package.source_hash.partition(":")
    return replace(
        package, url=package.source_url, algorithm=algorithm, hash=digest, size=None,
        source_url="", source_hash="",
    )  # fmt: skip


_PROGRAM = """\
import hashlib, importlib.util, os, shutil, subprocess, sys, urllib.request

address, file_name, algorithm, wanted, index = GIVEN
os.makedirs("artifacts", exist_ok=True)
# A sandbox has few threads. The time of files is part of what is built.
os.environ.update(TOKIO_WORKER_THREADS="2", RAYON_NUM_THREADS="2", SOURCE_DATE_EPOCH="315532800")
source = os.path.join("/tmp", os.path.basename(file_name))
digest = hashlib.new(algorithm)
try:
    with urllib.request.urlopen(address, timeout=60) as answer, open(source, "wb") as file:
        while piece := answer.read(1 << 20):
            digest.update(piece)
            file.write(piece)
except (OSError, ValueError) as error:
    sys.exit(f"{file_name} cannot be fetched: {error}")
if digest.hexdigest() != wanted:
    sys.exit(f"{file_name} has another hash than its lock.")
program = shutil.which("uv")
if program is None and not importlib.util.find_spec("uv"):
    sys.exit("The sandbox has no uv: `manage.py packages` installs it.")
options = ["build", "--wheel", "--out-dir", "artifacts", source, "--default-index", index,
           "--no-config", "--no-cache", "--no-python-downloads", "--python", sys.executable]
print("$ uv", *options, flush=True)
done = subprocess.run([*([program] if program else [sys.executable, "-m", "uv"]), *options])
sys.exit(done.returncode)
"""
