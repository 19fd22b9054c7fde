"""Randomised fault-injection test of two hosts: break them for a while, and print what failed."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.chaos.faults import FAULTS
from tests.chaos.run import LAUNCHERS, PAUSE_SECONDS, open_folder, run
from tests.support.servers import end_servers, start_servers


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all chances")
    parser.add_argument("--callers", type=int, default=12, help="who send work (12)")
    parser.add_argument(
        "--conversations", type=int, default=0, help="held at once; needs a pool (0)"
    )
    parser.add_argument("--tenants", type=int, default=3, help="who share the callers (3)")
    parser.add_argument(
        "--max-running", type=int, default=100, help="what each tenant may run at once (100)"
    )
    parser.add_argument("--faults", type=int, default=0, help="at least so many (0)")
    parser.add_argument("--only", choices=sorted(FAULTS), nargs="*", help="these faults alone")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="none", help="what runs the code (none isolates)"
    )
    parser.add_argument(
        "--pause", type=float, nargs=2, default=PAUSE_SECONDS, help="seconds between faults (1 4)"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the hosts' folders and logs")
    options = parser.parse_args()
    with open_folder(keep=options.keep) as folder:
        servers = start_servers(folder / "servers")
        print(f"seed {options.seed}, in {folder}", file=sys.stderr)
        try:
            verdict = run(
                folder,
                servers,
                seconds=options.minutes * 60,
                callers=options.callers,
                seed=options.seed,
                launcher=options.launcher,
                pause=tuple(options.pause),
                conversations=options.conversations,
                faults=options.faults,
                tenants=options.tenants,
                max_running=options.max_running,
                kinds=options.only or sorted(FAULTS),
                tell=lambda line: print(line, file=sys.stderr, flush=True),
            )
        finally:
            end_servers(servers)
    if options.json:
        print(json.dumps({"seed": options.seed, **verdict.figures, "wrong": verdict.wrong}))
    else:
        print(verdict.table())
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
