"""A machine without a network, where a bundle is installed, started and used.

`python -m tests.support.offline_machine BUNDLE FOLDER MODULE` in a network namespace of its own:
BUNDLE is the unpacked archive, FOLDER where to work, MODULE what a program imports. Prints what came of it as JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.processes import free_port, started

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def install_and_run(folder: Path, work: Path, module: str) -> dict[str, Any]:
    """From the unpacked archive to the answer of the first audited run."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    target, began = work / "opt", time.monotonic()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["PORT"] = str(free_port())

    def run(*command: str) -> str:
        done = subprocess.run(command, env=clean, cwd="/", capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    run("sh", str(folder / "install.sh"), str(target))
    installed = time.monotonic()
    manage = (str(target / ".venv/bin/python"), str(target / "manage.py"))
    key = dict(
        line.strip().split("=", 1) for line in run(*manage, "bootstrap").splitlines() if "=" in line
    )["API_KEY"]
    with started([*manage, "up"], clean, Path("/"), work / "log") as service:
        service.wait_until_ready(120)
        request = urllib.request.Request(
            f"{service.url}/api/v1/executions",
            data=json.dumps({"code": f"import {module}; print(6 * 7)"}).encode(),
            headers={"X-API-Key": key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result = json.load(answer)
        ran = time.monotonic()
        pages = ""
        for path in ("/admin/login/", "/api/docs"):
            with urllib.request.urlopen(service.url + path, timeout=60) as answer:
                pages += answer.read().decode()
        ledger = run(*manage, "verify_ledger")
    return {
        "interfaces": _interfaces(),
        "without_route": _without_route(),
        "outside": re.findall(r"""(?:src|href)=["']((?:https?:)?//[^"']+)""", pages),
        "status": result["status"],
        "stdout": result["stdout"],
        "ledger": ledger,
        "seconds": {
            "install": round(installed - began, 1),
            "start and run": round(ran - installed, 1),
            "all": round(ran - began, 1),
        },
    }


def _interfaces() -> list[str]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return [line.partition(":")[0].strip() for line in lines]


def _without_route() -> int:
    """How often somebody wanted to send what no interface could take, by the kernel's count."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines()[:2])
    counted = int(dict(zip(names, values, strict=True))["OutNoRoutes"])
    for line in Path("/proc/net/snmp6").read_text().splitlines():
        name, value = line.split()
        counted += int(value) if name == "Ip6OutNoRoutes" else 0
    return counted


if __name__ == "__main__":
    print(json.dumps(install_and_run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
