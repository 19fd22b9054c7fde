"""Sources that are built on a running site: what their code may do, and what is taken of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.package_index import make_sdist, package_index
from tests.support.template_door import TemplateDoor, template_door
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateDoor]:
    with template_door(
        tmp_path_factory.mktemp("site"),
        TEMPLATE_BUILDS_FROM_SOURCE="true",
        TEMPLATE_BUILD_SECONDS="20",
    ) as opened:
        yield opened


def build(door: TemplateDoor, name: str, **sdist: str) -> dict[str, Any]:
    """The version that came of a source distribution."""
    door.index.add_file(f"{name}-1.0.tar.gz", make_sdist(name, **sdist))
    place = f"/templates/{name}/versions/1"
    declaration = {"python": [name], "build": [name]}
    door.ask("POST", "/templates", name=name, declaration=declaration)
    wait_until(lambda: door.ask("GET", place)["state"] in ("ready", "failed"), 60)
    found: dict[str, Any] = door.ask("GET", place)
    return found


def test_a_source_is_built_and_imported(door: TemplateDoor) -> None:
    version = build(door, "sourced")
    assert version["state"] == "ready", version["problem"]
    (package,) = version["packages"]
    assert package["source"] == f"sha256:{door.index.hashes['sourced-1.0.tar.gz']}"
    code = "import sourced, sys; print(sourced.VERSION, 'evil' in sys.modules)"
    ran = door.ask("POST", "/executions", code=code, template="sourced")
    assert ran["stdout"] == "1.0 False\n", ran


@pytest.mark.parametrize(
    ("name", "extra", "wheel", "told"),
    [
        ("waits", "import time; time.sleep(1000)", "", "time"),
        ("fails", "raise SystemExit('by itself')", "", "could not be built"),
        ("poses", "pass", "other-1.0-py3-none-any.whl", ""),
        ("fills", "open('/tmp/x', 'wb').truncate(1 << 40)", "", "could not be built"),
    ],
)
def test_a_source_that_means_harm_ends_its_own_build_alone(
    door: TemplateDoor, name: str, extra: str, wheel: str, told: str
) -> None:
    version = build(door, name, extra=extra, wheel_name=wheel)
    assert (version["state"], version["digest"]) == ("failed", None)
    assert told in version["problem"]
    assert door.ask("POST", "/executions", code="print(1)")["stdout"] == "1\n"


def test_a_build_reaches_the_index_alone(door: TemplateDoor) -> None:
    with package_index() as other:
        reach = f"import urllib.request; urllib.request.urlopen({other.url!r})"
        assert build(door, "curious", extra=reach)["state"] == "failed"
        assert other.requests == []
