"""Sandboxes come of one process, and yet no two of them draw the same random numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers.pool.launchers.docker import DockerLauncher, DockerSettings
from providers.pool.pool import PoolSettings
from providers.pool.template import Template
from tests.conftest import require
from tests.rich import require_module
from tests.warm_pools import WarmPool

# Every source of random numbers that a process may have seeded before it was forked.
DRAW = """
import json, multiprocessing.process, os, random, secrets, ssl, sys, tempfile, uuid
import numpy
print(json.dumps({
    "random": random.random(),
    "numpy": numpy.random.random(),
    "numpy, normal": numpy.random.standard_normal(),
    "numpy, generator": numpy.random.default_rng().random(),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "secrets": secrets.token_hex(8),
    "openssl": ssl.RAND_bytes(8).hex(),
    "tempfile": next(tempfile._get_candidate_names()),
    "multiprocessing": multiprocessing.process.current_process().authkey.hex(),
    **{name: value() for name, value in getattr(sys, "more", {}).items()},
}))
"""

PRELOADED = ("numpy", "uuid", "ssl", "tempfile", "multiprocessing.process", "random")


def assert_all_different(drawn: list[dict[str, object]]) -> None:
    same = [name for name in drawn[0] if len({one[name] for one in drawn}) < len(drawn)]
    assert same == []


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


@pytest.fixture(params=["runc", "runsc"])
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
from providers.guest import reseed
reseed.find_generators()
# As a zygote does, of which each sandbox looks for its own template's again.
gc.freeze()
for _ in range(3):
    if os.fork() == 0:
        reseed.find_generators()
        reseed.reseed()
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
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    drawn = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(drawn) == 3
    assert_all_different(drawn)


def test_nothing_is_imported_for_it() -> None:
    code = """
import sys
from providers.guest import reseed
before = set(sys.modules)
reseed.find_generators()
reseed.reseed()
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = ['.']\n{code}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    assert done.stdout == "[]\n"
