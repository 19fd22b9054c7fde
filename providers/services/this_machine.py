"""Which isolation this machine offers, and what is missing for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from providers.errors import ProviderUnavailable
from providers.runtime.launchers.bubblewrap import check_start
from providers.runtime.launchers.oci import check_rights, find_runsc, find_tool
from providers.runtime.pool.cgroup import CgroupParent
from providers.runtime.service.docker_check import Docker, engine_runtimes, find_docker

# The providers whose sandboxes are on machines of one's own.
HERE = ("local", "self_managed")

_WITHOUT_IMAGES = "The Docker images are missing. Run manage.py build_images."
_NO_CGROUP = (
    "No cgroup can be created. Run the service as root, or with a delegated cgroup "
    "(systemd-run --user --scope -p Delegate=yes)."
)


@dataclass(frozen=True)
class Ability:
    """One way to isolate. `missing` names the remedy, and is empty if it is available."""

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
    in_docker = has_engine and any("runsc" in name for name in engine_runtimes())
    # The engine's runsc is enough once it has the images. Where only these are missing, their
    # remedy is shorter than to install a second runsc.
    where = ""
    if in_docker and (runsc or cgroup):
        runsc = cgroup = "" if found is Docker.READY else _WITHOUT_IMAGES
        where = ", through Docker"
    runtime = ""
    if has_engine:
        runtime = (
            f"; runtime: {'runsc (gVisor)' if in_docker else 'runc, because runsc is missing'}"
        )
    return [
        Ability(
            "gVisor, a new sandbox for every run",
            f"the strongest, starts slowly{where}",
            runsc,
        ),
        Ability(
            "gVisor, one kernel per tenant",
            f"as strong between tenants, starts fast; sandbox sharing: tenant-kernel{where}",
            runsc or cgroup,
        ),
        Ability("Docker", f"containers from your own images{runtime}", docker),
        Ability("bubblewrap", "namespaces, starts fastest", bwrap),
        Ability(
            "runc or crun, without Docker",
            "namespaces, containers without a daemon",
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
