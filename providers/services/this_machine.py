"""What isolation this machine offers, and what is missing for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from providers.errors import ProviderUnavailable
from providers.pool.cgroup import CgroupParent
from providers.pool.launchers.bubblewrap import check_start
from providers.pool.launchers.gvisor import find_runsc
from providers.pool.launchers.runc import check_rights, find_tool
from providers.pool.service.docker_check import Docker, engine_runtimes, find_docker

# The providers whose sandboxes are on machines of one's own.
HERE = ("local", "self_managed")

_WITHOUT_IMAGES = "Docker answers without our images: manage.py build_images."
_NO_CGROUP = (
    "No cgroup can be made here: run the service as root, or with one delegated to it "
    "(systemd-run --user --scope -p Delegate=yes)."
)


@dataclass(frozen=True)
class Ability:
    """One way to isolate. `missing` says what to do for it, empty where it can be had."""

    name: str
    about: str
    missing: str = ""


def abilities_for(provider_id: str) -> Sequence[Ability]:
    """What its form shows, at most a minute old: a page does not wait for an engine each time."""
    return _abilities_of(int(time.monotonic() // 60)) if provider_id in HERE else ()


@lru_cache(maxsize=1)
def _abilities_of(minute: int) -> list[Ability]:
    return abilities()


def abilities() -> list[Ability]:
    """The strongest first. Looks at what is installed and allowed, asks the Docker engine, and
    starts an empty bubblewrap."""
    has_cgroup = _has_cgroup()
    cgroup = "" if has_cgroup else _NO_CGROUP
    runsc, bwrap = _missing(find_runsc), _missing(check_start)
    tools = {name: _missing(partial(find_tool, name)) for name in ("crun", "runc")}
    tool = "" if "" in tools.values() else " ".join(tools.values())
    found = find_docker()
    docker = _WITHOUT_IMAGES if found is Docker.WITHOUT_IMAGES else found.value
    has_engine = found in (Docker.READY, Docker.WITHOUT_IMAGES)
    in_docker = has_engine and "runsc" in engine_runtimes()
    # What the engine has is enough, once it has our images.
    if in_docker and found is Docker.READY:
        runsc = cgroup = ""
    where = ""
    if has_engine:
        where = f"; its engine has {'runsc' if in_docker else 'no runsc, so that it is runc'}"
    return [
        Ability("gVisor, fresh for every run", "the strongest; slow to start", runsc),
        Ability(
            "gVisor, a kernel per tenant",
            "as strong against the machine and other tenants, and fast: tenant-kernel",
            runsc or cgroup,
        ),
        Ability("Docker", f"images of your own{where}", docker),
        Ability("bubblewrap", "namespaces; the fastest", bwrap),
        Ability(
            "runc or crun, without Docker",
            "namespaces; containers without a daemon",
            tool or _missing(check_rights) or cgroup,
        ),
    ]


def _missing(check: Callable[[], object]) -> str:
    try:
        check()
    except ProviderUnavailable as error:
        return error.message
    return ""


def _has_cgroup() -> bool:
    parent = CgroupParent.create()
    if parent is not None:
        parent.remove()
    return parent is not None
