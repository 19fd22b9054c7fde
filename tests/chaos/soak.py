"""Everything that takes hours: long chaos by every launcher, conversations, the full matrix, the
API against its description, E2B's SDKs over each kind of sandbox, the load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.run import LAUNCHERS
from tests.e2b_sdks.__main__ import LAUNCHERS as E2B_LAUNCHERS
from tests.support.processes import ROOT

WITH_SERVERS = str(ROOT / ".ci" / "with-servers")
# A database and a broker, and what of the servers' environment is then left out.
MATRIX = {
    ("sqlite", "orm"): ("DATABASE_URL", "REDIS_URL", "Q_BROKER"),
    ("sqlite", "redis"): ("DATABASE_URL",),
    ("postgres", "orm"): ("REDIS_URL", "Q_BROKER"),
    ("postgres", "redis"): (),
}
LOAD = ("bounds", "serving", "queue", "instances")
# What is killed in turn while conversations are held, and the seconds between: where the pool lives,
# every session has to go on, and an engine is up again only after some. And how often, and how many
# are held at once.
_HOSTS = ("kill-web", "kill-worker", "kill-up")
KILLS = {
    "hosts": ("bubblewrap", _HOSTS, ("2", "6")),
    "pool": ("bubblewrap", (*_HOSTS, "kill-pool"), ("2", "6")),
    "engine": ("docker", (*_HOSTS, "kill-pool", "kill-engine"), ("10", "20")),
}
KILLED, CONVERSATIONS = 100, 6
TENANTS_MINUTES = 10.0
# What of a step's end is shown when it failed, and with every chaos.
SHOWN_LINES = 30


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]


def steps(minutes: float) -> Iterator[Step]:
    python = sys.executable
    for launcher in LAUNCHERS:
        command = [python, "-m", "tests.chaos", "--minutes", str(minutes), "--launcher", launcher]
        yield Step(f"chaos-{launcher}", command)
    for name, (launcher, kinds, pause) in KILLS.items():
        command = [python, "-m", "tests.chaos", "--minutes", "0", "--launcher", launcher]
        command += ["--faults", str(KILLED), "--conversations", str(CONVERSATIONS)]
        command += ["--pause", *pause, "--callers", "3"]
        yield Step(f"conversations-{name}", [*command, "--only", *kinds])
    # A hundred callers of twenty tenants, none of which may have more than four at once.
    command = [python, "-m", "tests.chaos", "--minutes", str(min(minutes, TENANTS_MINUTES))]
    command += ["--callers", "100", "--tenants", "20", "--max-running", "4", "--pause", "20", "40"]
    yield Step("tenants", [*command, "--only", *_HOSTS])
    for (database, broker), left_out in MATRIX.items():
        environment = ["env", *(f"--unset={name}" for name in left_out)]
        course = [python, "-m", "pytest", "-q", "-m", "(db or database) and not one_database"]
        yield Step(f"tests-{database}-{broker}", [WITH_SERVERS, *environment, *course])
    yield Step("described", [python, "-m", "tests.chaos.described", "--examples", "100"])
    for launcher in E2B_LAUNCHERS:
        yield Step(f"e2b-{launcher}", [python, "-m", "tests.e2b_sdks", "--launcher", launcher])
    for name in LOAD:
        module = [python, "-m", f"benchmarks.{name}"]
        yield Step(f"load-{name}", ["env", "DURABLE=yes", WITH_SERVERS, *module])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of each chaos (30)")
    parser.add_argument("--only", nargs="*", default=[], help="steps whose names begin with these")
    parser.add_argument("--logs", type=Path, default=ROOT / "var" / "soak")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    wanted = tuple(options.only) or ("",)
    rows = [
        _carried_out(step, options.logs / f"{step.name}.log")
        for step in steps(options.minutes)
        if step.name.startswith(wanted)
    ]
    print(f"\n{'step':<24}{'seconds':>8}  outcome")
    for name, seconds, code in rows:
        print(f"{name:<24}{seconds:>8.0f}  {f'FAILED ({code})' if code else 'held'}")
    print(f"logs in {options.logs}")
    return 1 if not rows or any(code for _, _, code in rows) else 0


def _carried_out(step: Step, log: Path) -> tuple[str, float, int]:
    """Name, seconds and exit code. Nothing is left out because something before it failed."""
    print(f"--- {step.name}", flush=True)
    began = time.monotonic()
    with log.open("wb") as stream:
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            env=os.environ | {"REQUIRE": "all"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode or step.name.startswith(("chaos", "conversations")):
        print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]), flush=True)
    return step.name, time.monotonic() - began, done.returncode


if __name__ == "__main__":
    sys.exit(main())
