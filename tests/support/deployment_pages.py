"""The commands of the deployment pages, and a machine to run them on that is thrown away."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import NO_DOCKER, ROOT

PAGES = ROOT / "docs" / "deployment"
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of commands. `reason` says why it is not run, "" where it is."""

    page: str
    line: int
    text: str
    reason: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        if match[2] != "sh":
            continue
        before = text[: match.start()].rstrip().rpartition("\n\n")[2].strip()
        before = " ".join(before.split())
        reason = before.strip("*") if before.startswith("*Not run") else ""
        indent = len(match[1])
        lines = [line[indent:] for line in match[3].splitlines()]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(path.name, line, "\n".join(lines), reason))
    return found


# What the pages leave to systemd is done by these: they read the units.
_PREAMBLE = """
set -eEu
umask 022
shopt -s expand_aliases
export DEBIAN_FRONTEND=noninteractive DOCKER_HOST={no_docker}
mount --make-rprivate /
mount -t tmpfs tmpfs {overlays}
for place in etc opt usr var root; do
    mkdir -p {overlays}/$place/up {overlays}/$place/work
    mount -t overlay overlay -o lowerdir=/$place,upperdir={overlays}/$place/up,workdir={overlays}/$place/work /$place
done
mount -t tmpfs tmpfs /run
# As on the pages' machine, where a sandbox of bubblewrap costs a tenth of one of gVisor.
for runsc in $(type -aP runsc); do mount --bind /dev/null "$runsc"; done
# There is no network: what is installed is taken as it is.
echo 'APT::Get::Upgrade "false";' > /etc/apt/apt.conf.d/99-as-it-is
ip link set lo up 2> /dev/null || python3 - << 'PYTHON'
import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x49, b""))
PYTHON

# The environment that runs the tests is complete, so `make` has nothing to install into it.
mkdir -p {overlays}/venv/up {overlays}/venv/work {overlays}/venv/all
mount -t overlay overlay -o lowerdir={venv},upperdir={overlays}/venv/up,workdir={overlays}/venv/work {overlays}/venv/all
make() {{
    if [ -d /opt/cofferdam ] && [ ! -e /opt/cofferdam/.venv/bin/python ]; then
        mkdir -p /opt/cofferdam/.venv
        mount --bind {overlays}/venv/all /opt/cofferdam/.venv
    fi
    command make "$@"
}}

start_units() {{
    # Named, else all of the target, which names them in the order in which they start.
    for unit in ${{@:-$(sed -n 's/^Wants=//p' /etc/systemd/system/cofferdam.target)}}; do
        (
            set -a; . /etc/cofferdam/cofferdam.env; set +a
            file=/etc/systemd/system/$unit
            drop_ins=$(ls $file.d/*.conf 2> /dev/null || true)
            user=$(sed -n 's/^User=//p' $file)
            cd "$(sed -n 's/^WorkingDirectory=//p' $file)"
            sed -n 's/^ExecStartPre=//p' $file | while read -r line; do runuser -u "$user" -- $line; done
            command=$(sed -n 's/^ExecStart=//p' $file $drop_ins | tail -n 1)
            exec python3 {root}/tests/support/restricted.py $file $drop_ins -- $command
        ) > {overlays}/$unit.$RANDOM.log 2>&1 &
    done
}}
stop_units() {{ kill -TERM $(jobs -p) 2> /dev/null || true; wait; }}
wait_for() {{
    for _ in $(seq 600); do
        "$@" > /dev/null 2>&1 && return 0
        sleep 0.1
    done
    echo "never succeeded: $*" >&2
    cat {overlays}/*.log >&2
    return 1
}}
end() {{ code=$?; [ $code = 0 ] || tail -n 40 {overlays}/*.log >&2 2> /dev/null; exit $code; }}
trap end EXIT
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
cd {root}
"""


def run(script: str, folder: Path, seconds: float = 300) -> str:
    """Run commands as root on a machine of their own; their output, which is also a failure's.

    Its files are this one's, with every change in memory; its network is empty, and all processes
    of it end with it.
    """
    overlays = folder / "overlays"
    overlays.mkdir()
    preamble = _PREAMBLE.format(
        no_docker=NO_DOCKER,
        overlays=shlex.quote(str(overlays)),
        venv=shlex.quote(sys.prefix),
        root=shlex.quote(str(ROOT)),
    )
    (folder / "script").write_text(preamble + script)
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    inherited["PACKAGES"] = "no"
    done = subprocess.run(
        [*command, "bash", str(folder / "script")],
        env=inherited | {"HOME": "/root"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
