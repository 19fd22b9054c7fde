"""The /etc of sandboxes that see this machine's programs: made by us, not the machine's.

Its own /etc would tell names, addresses and habits of the machine; without any, programs fail:
Debian's matplotlib wants a matplotlibrc, `getpass` a user, some libraries the links of
update-alternatives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from providers.runtime.guest.root import group, passwd

# Who a program is where every sandbox has the same user.
NOBODY = 65534

_FILES = {
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
    "matplotlibrc": "# What is not named here is matplotlib's own default.\nbackend: agg\n",
    "fonts/fonts.conf": "<?xml version='1.0'?>\n"
    "<!DOCTYPE fontconfig SYSTEM 'urn:fontconfig:fonts.dtd'>\n"
    "<fontconfig><dir>/usr/share/fonts</dir><cachedir>/tmp/.fontconfig</cachedir></fontconfig>\n",
}


def digest(hidden: Iterable[Path], etc: Path = Path("/etc")) -> bytes:
    """Changes whenever `write` would write something else."""
    seen = [passwd(NOBODY), group(NOBODY), repr(sorted(_FILES.items())), repr(sorted(hidden))]
    for name in ("alternatives", "ld.so.cache"):
        path = etc / name
        seen.append(repr(path.stat().st_mtime_ns) if path.exists() else "")
    return "\0".join(seen).encode()


def write(folder: Path, hidden: Iterable[Path], etc: Path = Path("/etc")) -> None:
    """Fill `folder`. Nothing in it names what is below one of the `hidden` folders."""
    hidden = list(hidden)
    for name, text in {
        **_FILES,
        "passwd": passwd(NOBODY),
        "group": group(NOBODY),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _copy_links(etc / "alternatives", folder / "alternatives", hidden)
    _write_linker_cache(etc, folder, hidden)


def _copy_links(source: Path, target: Path, hidden: list[Path]) -> None:
    """The links of update-alternatives, as far as they lead to programs that sandboxes see."""
    target.mkdir()
    if not source.is_dir():
        return
    for link in source.iterdir():
        if not link.is_symlink():
            continue
        leads_to = Path(os.readlink(link))
        if leads_to.is_relative_to("/usr") and not any(map(leads_to.is_relative_to, hidden)):
            (target / link.name).symlink_to(leads_to)


def _write_linker_cache(etc: Path, folder: Path, hidden: list[Path]) -> None:
    """Where the dynamic linker finds libraries. Without the cache it knows its own folders only."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        return
    named: list[str] = []
    for path in (etc / "ld.so.conf", *sorted(etc.glob("ld.so.conf.d/*.conf"))):
        if path.is_file():
            named += [line.strip() for line in path.read_text(errors="replace").splitlines()]
    folders = [
        line
        for line in named
        if line.startswith("/") and not any(map(Path(line).is_relative_to, hidden))
    ]
    listed = folder / "ld.so.conf"
    listed.write_text("".join(f"{line}\n" for line in folders))
    # -X: it changes no link of the machine's.
    command = [ldconfig, "-X", "-C", str(folder / "ld.so.cache"), "-f", str(listed)]
    subprocess.run(command, check=False, capture_output=True)
