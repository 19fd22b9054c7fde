"""Check what examples/adapters shows: each over the framework itself, against a running service.

Every adapter has an environment of its own, made of its lock, in .venv-adapters.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.processes import ROOT
from tests.support.site import MANAGE, Site, prepare, serving

ADAPTERS = ROOT / "examples" / "adapters"
ENVIRONMENTS = ROOT / ".venv-adapters"
NAMES = tuple(sorted(path.parent.name for path in ADAPTERS.glob("*/requirements.in")))
CHECK_SECONDS = 900
# What the service of an adapter has that `make run`'s has not: Inspect takes 10 MiB of output.
SETTINGS = {"inspect-ai": {"SANDBOX_MAX_OUTPUT_KB": "10240"}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make adapters", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--keep-output", action="store_true", help="print what each check says")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}, but {', '.join(NAMES)}")
    failed = False
    for name in options.names or NAMES:
        with running_service(**SETTINGS.get(name, {})) as site:
            is_ok, output = checked(name, variables_of(site))
        failed |= not is_ok
        last = (output.strip().splitlines() or ["nothing was said"])[-1]
        print(f"{name}: {'ok' if is_ok else 'FAILED'}: {last}", flush=True)
        if options.keep_output or not is_ok:
            print(output, flush=True)
    return int(failed)


@contextmanager
def running_service(**settings: str) -> Iterator[Site]:
    """One of its own. What setting it up says is printed only where that fails."""
    with TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        try:
            with said.open("w") as log:
                prepared = prepare(Path(folder) / "data", log)
        except subprocess.CalledProcessError:
            print(said.read_text(), file=sys.stderr)
            raise
        with serving(prepared, Path(folder) / "log", **settings) as site:
            yield site


def variables_of(site: Site) -> dict[str, str]:
    """What a user of the service sets, and where the client is that was not installed."""
    url = site.service.url
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "COFFERDAM_URL": url,
        "COFFERDAM_API_KEY": site.alice,
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "E2B_API_KEY": key_for_older_clients(site),
        "PYTHONPATH": str(ROOT / "clients" / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def key_for_older_clients(site: Site) -> str:
    words = ("create_api_key", "wonderland", "--name", "adapters", "--e2b")
    environment = os.environ | {"DATA_DIR": str(site.data_dir), "ENV_FILE": os.devnull}
    done = subprocess.run(
        [*MANAGE, *words], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def checked(name: str, variables: dict[str, str]) -> tuple[bool, str]:
    """Whether it is well, and what was said."""
    try:
        python = installed(name)
        done = subprocess.run(
            [python, "-m", "pytest"],
            cwd=ADAPTERS / name,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CHECK_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        return False, f"{error.stdout}\nits lock could not be installed"
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if error.stdout else ""
        return False, f"{said}\nit took longer than {CHECK_SECONDS} s"
    return done.returncode == 0, done.stdout


def installed(name: str) -> Path:
    """Its Python. The lock that was installed is kept, to install again when it has changed."""
    lock, environment = ADAPTERS / name / "requirements.txt", ENVIRONMENTS / name
    python, kept = environment / "bin" / "python", environment / "requirements.txt"
    if kept.exists() and kept.read_bytes() == lock.read_bytes():
        return python
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    for command in (
        (sys.executable, "-m", "venv", "--clear", environment),
        (*pip, "--no-deps", "--require-hashes", "-r", lock),
    ):
        subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    shutil.copy(lock, kept)
    return python


if __name__ == "__main__":
    sys.exit(main())
