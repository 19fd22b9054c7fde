"""Sandboxes come of one process, and yet no two of them draw the same random numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.template import Template
from tests.conftest import require
from tests.providers.launchers.random_numbers import DRAW, PRELOADED, assert_all_different
from tests.support.processes import ROOT
from tests.support.rich import require_module
from tests.support.warm_pools import WarmPool


@pytest.mark.parametrize("level", ["execution", "tenant"])
def test_two_tenants_draw_different_numbers_with_numpy_preloaded(level: str) -> None:
    require("bwrap")
    require_module("numpy")
    settings = PoolSettings(size=2, capacity=4, isolation=level)  # type: ignore[arg-type]
    template = Template("python", "python", preload=PRELOADED)
    with WarmPool(settings, {"python": template}) as pool:
        assert_all_different(
            [_drawn(pool, owner) for owner in ("alice", "charlie", "alice", "charlie")]
        )


# Under runc the kernel is that of bubblewrap, of which another test tells.
@pytest.fixture(params=[pytest.param("runc", marks=pytest.mark.slow), "runsc"])
def containers(request: pytest.FixtureRequest) -> Iterator[WarmPool]:
    """A pool at the level `tenant` over containers with numpy preloaded."""
    request.getfixturevalue("engine")
    launcher = DockerLauncher(DockerSettings(runtime=request.param, pool_id="reseeding"))
    settings = PoolSettings(size=1, capacity=4, isolation="tenant", patience=60)
    template = Template("python", "python", preload=PRELOADED)
    with WarmPool(settings, {"python": template}, launcher=launcher) as pool:
        yield pool


def test_two_tenants_draw_different_numbers_in_kept_containers(containers: WarmPool) -> None:
    assert_all_different(
        [_drawn(containers, owner) for owner in ("alice", "charlie", "alice", "charlie")]
    )


def _drawn(pool: WarmPool, owner: str) -> dict[str, object]:
    result = pool.run(DRAW, owner)
    assert result.exit_code == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


# What a preloaded library may keep for itself, used before the fork as libraries do.
LIBRARY = """
import gc, os, random, sys
import numpy
class Library:
    own = random.Random()
    state = numpy.random.RandomState()
    generator = numpy.random.default_rng()
    other = numpy.random.Generator(numpy.random.Philox())
    bits = numpy.random.SFC64()
for one in (Library.own, Library.generator, Library.other): one.random()
Library.state.standard_normal()
numpy.random.standard_normal()
sys.more = {
    "a library's own": Library.own.random,
    "a library's state": Library.state.standard_normal,
    "a library's generator": lambda: Library.generator.random(),
    "a library's other generator": lambda: Library.other.random(),
    "what comes of a library's generator": lambda: Library.generator.spawn(1)[0].random(),
    "a library's bare bits": lambda: int(Library.bits.random_raw()),
}
from providers.runtime.guest import preload
preload.find_generators()
# As a zygote does, of which each sandbox looks for its own template's again.
gc.freeze()
for _ in range(3):
    if os.fork() == 0:
        preload.find_generators()
        preload.reseed()
        exec(sys.argv[1])
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def test_generators_that_a_library_keeps_are_seeded_anew() -> None:
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, DRAW],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    drawn = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(drawn) == 3
    assert_all_different(drawn)


def test_nothing_is_imported_for_it() -> None:
    code = """
import sys
from providers.runtime.guest import preload
before = set(sys.modules)
preload.find_generators()
preload.reseed()
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = ['.']\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == "[]\n"
