"""Ask a service at random for all that its description has, by schemathesis, and judge the answers.

No failure of the service, no status, header, media type or shape that is not described, and nothing
accepted that the description forbids, or refused that it allows. Event streams are left out: they
do not end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.processes import ROOT
from tests.support.site import MANAGE, Prepared, Site, prepare, serving

CONFIGURATION = Path(__file__).with_suffix(".toml")
STREAMS, ADMINISTRATION = "/events$", "^/api/admin/"
# Nothing is refused for how often it is asked.
UNBOUNDED = {"SANDBOX_MAX_REQUESTS_PER_MINUTE": "10000000"}
_SECONDS_OF_A_REQUEST = 60

_ADMINISTRATOR = """
from executions.models import Scope, Tenant
from executions.tenants.keys import create_api_key
tenant = Tenant.objects.get(slug="wonderland")
print(create_api_key(tenant, "everything", scopes=" ".join(Scope.values))[1])
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.described", description=__doc__)
    parser.add_argument("--examples", type=int, default=30, help="of each operation (30)")
    parser.add_argument("--seed", type=int, default=1, help="of all chances (1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(Path(folder) / "data")
        administrator = _administrator(prepared)
        with serving(prepared, Path(folder) / "log", **UNBOUNDED) as site:
            bounds = ["--max-examples", str(options.examples), "--seed", str(options.seed)]
            courses = _courses(site.alice, administrator)
            failed = [_asked(site, folder, key, *bounds, *rest) for key, rest in courses]
    return int(any(failed))


def _courses(key: str, administrator: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Who asks, and for what. What is configured at random comes after all that needs a provider."""
    yield key, ("--phases", "coverage,fuzzing,stateful")
    only = ("--include-path-regex", ADMINISTRATION)
    yield administrator, ("--phases", "coverage,fuzzing", *only)


def _asked(site: Site, folder: str, key: str, *options: str) -> int:
    """schemathesis's exit code. What it keeps for its next time goes with the folder."""
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", CONFIGURATION]
    command += ["run", f"{site.service.url}/api/schema", "--no-color", "--continue-on-failure"]
    command += ["--header", f"X-API-Key: {key}", "--exclude-path-regex", STREAMS]
    command += ["--request-timeout", str(_SECONDS_OF_A_REQUEST), "--generation-database", "none"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *options], cwd=folder, env=environment, check=False).returncode


def _administrator(prepared: Prepared) -> str:
    done = subprocess.run(
        [*MANAGE, "shell", "-c", _ADMINISTRATOR],
        env=prepared.environment(),
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return done.stdout.decode().split()[-1]


if __name__ == "__main__":
    sys.exit(main())
