"""Bundles of the Open Container Initiative: a root, what is mounted in it, and who runs what there.

The root is one of this machine's programs, or that of an image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from providers.runtime.guest.root import HOME
from providers.runtime.launchers.guest_files import (
    INSIDE,
    TEMPLATE,
    boot,
    interpreter_options,
    node_path,
    program_folders,
    search_path,
)
from providers.runtime.launchers.image_archive import OWN_FILES
from providers.runtime.launchers.images import Image
from providers.runtime.pool.launcher import OOM_SCORE_ADJ
from providers.runtime.pool.template import NPM_RETRIES, OWN_PROGRAMS, WORKSPACE

Home = Literal["link", "mount", "folder"]

NAMESPACES = ("pid", "ipc", "uts", "mount", "network")

_ENVIRONMENT = {"HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp", NPM_RETRIES: "0"}


@dataclass(frozen=True)
class Seen:
    """What of this machine is seen inside: the programs of `python` without what is `hidden`, and
    the guest's own folder, with the /etc in it."""

    python: str
    guest_dir: Path
    hidden: Sequence[Path]


def make_root(
    root: Path,
    seen: Seen,
    size: int,
    more: Sequence[dict[str, Any]] = (),
    *,
    room: Sequence[str] = (),
    home: Home = "link",
) -> list[dict[str, Any]]:
    """Make the folder that is the root, where all is to be mounted; return the mounts.

    Each of those that can be written to holds `size` bytes, and has `room` as its further options.
    `home` is what the workspace's other name is: a link to it, a mount, or an empty folder, for a
    guest that mounts by itself.
    """
    mounts = _own(seen, size, more, room)
    mounts += [bind(path, path) for path in program_folders(seen.python)]
    # An empty folder over what is not to be seen. Its name still is.
    mounts += [mount(str(path), "tmpfs", "ro") for path in seen.hidden if os.path.isdir(path)]
    mounts.append(bind(str(seen.guest_dir / "etc"), "/etc"))
    root.mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path_outside = Path("/") / name
        if path_outside.is_symlink():
            (root / name).symlink_to(os.readlink(path_outside))
        elif path_outside.is_dir():
            mounts.append(bind(str(path_outside), str(path_outside)))
    for each in mounts:
        point = root / each["destination"].lstrip("/")
        if each["type"] == "bind" and Path(each["source"]).is_file():
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
        elif not each["destination"].startswith("/dev/"):
            point.mkdir(parents=True, exist_ok=True)
    (root / "root").mkdir(exist_ok=True)
    place = root / HOME.lstrip("/")
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        if home == "link":
            place.symlink_to(WORKSPACE)
        else:
            place.mkdir()
        if home == "mount":
            # A path of the new root before that is entered: what is mounted there by then.
            workspace = bind(str(root / WORKSPACE.lstrip("/")), HOME)
            mounts.append({**workspace, "options": ["bind", "nosuid", "nodev"]})
    for point in (root, *root.rglob("*")):
        # Inside, it is another user's to read; the folder around the bundle is not.
        if not point.is_symlink():
            point.chmod(0o755 if point.is_dir() else 0o644)
    for path in (WORKSPACE, "/tmp"):
        # runc gives a file system the mode of the folder that it lies over.
        (root / path.lstrip("/")).chmod(0o1777)
    return mounts


def mounts_over(
    image: Image,
    seen: Seen,
    size: int,
    more: Sequence[dict[str, Any]] = (),
    *,
    room: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The mounts in the root of an image, which has the folders and files that they lie over."""
    files = [bind(str(seen.guest_dir / name), f"/{name}") for name in OWN_FILES]
    if image.folder:
        # In the guest's own folder, as nothing can be added to the image.
        files.append(bind(str(image.folder), TEMPLATE))
    return _own(seen, size, more, room) + files


def _own(
    seen: Seen, size: int, more: Sequence[dict[str, Any]], room: Sequence[str]
) -> list[dict[str, Any]]:
    """What is there whatever the programs are."""
    dev = with_devices(mount("/dev", "tmpfs", "mode=755", "size=64k", "nr_inodes=64"))
    mounts = [mount("/proc", "proc"), dev, *more]
    for path in (WORKSPACE, "/tmp", "/dev/shm"):
        mounts.append(mount(path, "tmpfs", f"size={size}", "mode=1777", *room))
    return [*mounts, bind(str(seen.guest_dir), INSIDE)]


def process_of(
    python: str,
    module: str,
    arguments: Sequence[str],
    capabilities: Sequence[str] = (),
    *,
    uid: int = 0,
    image: Image | None = None,
) -> dict[str, Any]:
    """Process 1: the guest's `module`, by this user with these capabilities and no way to more.

    In an image it runs with the Python of that, and programs have its environment.
    """
    kept = list(capabilities)
    path = search_path(python)
    if image:
        python = image.interpreter("python") or ""
        path = f"{image.path}:{INSIDE}/bin:{OWN_PROGRAMS}/bin"
    own = image.environment if image else dict(node_path(python))
    if image and image.folder:
        own = {**own, "NODE_PATH": f"{TEMPLATE}/node_modules"}
    environment = {**own, **_ENVIRONMENT, "PATH": path}
    return {
        "terminal": False,
        "cwd": "/",
        "user": {"uid": uid, "gid": uid},
        "args": [*interpreter_options(python), boot(INSIDE, module), *arguments],
        "env": [f"{name}={value}" for name, value in environment.items()],
        "noNewPrivileges": True,
        "oomScoreAdj": OOM_SCORE_ADJ,
        "capabilities": {"bounding": kept, "effective": kept, "permitted": kept},
    }


def write_bundle(
    folder: Path,
    process: Mapping[str, Any],
    mounts: Sequence[Mapping[str, Any]],
    root: Path = Path("rootfs"),
    linux: Mapping[str, Any] | None = None,
    namespaces: Sequence[str] = NAMESPACES,
) -> None:
    """Write the bundle's description into its folder. `linux` is what a runtime on the machine's
    own kernel needs beside the namespaces."""
    described = {
        "ociVersion": "1.0.0",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": True},
        "mounts": list(mounts),
        "process": process,
        "linux": {"namespaces": [{"type": kind} for kind in namespaces], **(linux or {})},
    }
    (folder / "config.json").write_text(json.dumps(described))


def mount(destination: str, kind: str, *options: str) -> dict[str, Any]:
    """A new file system inside."""
    return {
        "destination": destination,
        "type": kind,
        "source": kind,
        "options": ["nosuid", "nodev", *options],
    }


def with_devices(mounted: dict[str, Any]) -> dict[str, Any]:
    """The same file system, in which devices are opened."""
    return {**mounted, "options": [each for each in mounted["options"] if each != "nodev"]}


def bind(source: str, destination: str) -> dict[str, Any]:
    """A file or folder of this machine's, to be read only."""
    return {
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": ["rbind", "ro", "nosuid", "nodev"],
    }
