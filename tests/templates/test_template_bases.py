"""Bases of templates: which providers have them, and what a build makes of what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from executions.capabilities.templates import builds
from executions.capabilities.templates.names import store
from executions.runs.models import Execution
from providers.errors import InvalidConfiguration, RateLimited
from providers.templates.base import Base
from providers.templates.store import python_release
from providers.values import ArtifactFile, ExecutionResult
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.package_index import PackageIndex
from tests.support.running import run
from tests.support.template_images import add_deb, hello
from tests.support.templates import URL, builder, built, finished, resolves

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

DIGEST = f"sha256:{'a' * 64}"
IMAGE = {"base": "image:own"}


@pytest.fixture
def images(resolver: Liar, settings: Any) -> Liar:
    """A provider that has images and packages in them."""
    settings.TEMPLATE_IMAGES = ["own"]
    resolver.does("template_bases", lambda: frozenset(("image", "apt")))
    return resolver


def tells(liar: Liar, index: PackageIndex, lock: str = "", **more: Any) -> None:
    """Have each run print the facts of an image, and leave the lock of apt."""
    said = {
        "base": {
            "python": "3.12",
            "interpreter": "/usr/bin/python3.12",
            "libc": "glibc 2.36",
            "machine": "x86_64",
            **more,
        },
        "has_apt": True,
        "sources": [index.url],
    }
    artifacts = [ArtifactFile("apt.txt", "text/plain", lock.encode())] if lock else []
    meta = {"image_digest": DIGEST}
    liar.answers(stdout=json.dumps(said), artifacts=artifacts, metadata=meta)


def line(index: PackageIndex) -> str:
    """Apt's line of a package that the index serves."""
    (package,) = add_deb(index, "hello-of-a-test", hello()).packages
    return f"'{package.url}' {package.file_name} {package.size} SHA256:{package.hash}"


def test_another_interpreter_is_built_for_without_a_look(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    name = f"python{python_release()}"
    index.add("tinymath")
    resolves(resolver, index)
    resolver.does("template_bases", lambda: frozenset(("interpreter",)))
    version = built(alice.tenant, base=name, python=["tinymath"])
    assert (version.state, version.python) == ("ready", python_release()), version.problem
    assert version.based == Base(name)
    assert "'--python-version'" in resolver.module.jobs[-1].code
    assert store().verify(version.digest) == ""
    assert run(alice, "1", template="science").status_code == 200


def test_an_interpreter_that_is_not_here_fails_the_build(alice: Caller, resolver: Liar) -> None:
    version = built(alice.tenant, base="python3.99", python=["tinymath"])
    assert version.state == "failed"
    assert "This machine has no python3.99" in version.problem
    assert not Execution.objects.exists()


def test_a_provider_without_the_base_is_passed_over(
    alice: Caller, index: PackageIndex, images: Liar
) -> None:
    tells(images, index)
    version = built(alice.tenant, **IMAGE)
    assert version.state == "ready", version.problem
    for has, said in ((frozenset(("interpreter",)), "image:own"), (frozenset(), "image:own")):
        images.does("template_bases", lambda has=has: has)
        answer = run(alice, "1", template="science")
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    version = finished(builds.request_build(version.template, "test"))
    assert version.state == "failed"
    assert "no templates whose base is image:own" in version.problem
    assert len(store().digests()) == 1


def test_packages_of_debian_need_a_provider_that_has_them(
    alice: Caller, index: PackageIndex, images: Liar
) -> None:
    tells(images, index, line(index))
    assert built(alice.tenant, **IMAGE, apt=["hello-of-a-test"]).state == "ready"
    images.does("template_bases", lambda: frozenset(("image",)))
    answer = run(alice, "1", template="science")
    assert "apt packages: they need Docker" in answer.json()["error"]["message"]


def test_a_build_waits_for_packages_that_are_being_installed(
    alice: Caller, index: PackageIndex, images: Liar
) -> None:
    tells(images, index, line(index))
    opened: list[bool] = []
    sandbox = images.module.LiarsSandbox

    def busy() -> Any:
        opened.append(True)
        if len(opened) in (3, 4):
            raise RateLimited("being installed", field="template", retry_after=0.01)
        return sandbox()

    images.does("open", busy)
    version = built(alice.tenant, **IMAGE, apt=["hello-of-a-test"])
    assert version.state == "ready", version.problem
    # A look, the lock, two that found it busy, and the one that had it.
    assert len(opened) == 5


def test_packages_that_cannot_be_installed_leave_nothing(
    alice: Caller, index: PackageIndex, images: Liar
) -> None:
    tells(images, index, line(index))
    opened: list[bool] = []

    def refuses() -> Any:
        opened.append(True)
        if len(opened) == 3:
            raise InvalidConfiguration("template: dpkg: error", field="template")
        return images.module.LiarsSandbox()

    images.does("open", refuses)
    version = built(alice.tenant, **IMAGE, apt=["hello-of-a-test"])
    assert version.state == "failed"
    assert "dpkg: error" in version.problem
    assert store().digests() == []


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        (lambda liar, index: tells(liar, index, interpreter="sh -c x"), "cannot be the"),
        (lambda liar, index: liar.answers(stdout="nonsense"), "cannot be read"),
        (lambda liar, index: liar.answers(stdout="", exit_code=1), "cannot be read"),
    ],
)
def test_an_image_that_lies_of_itself_fails_the_build(
    alice: Caller,
    index: PackageIndex,
    images: Liar,
    lies: Callable[[Liar, PackageIndex], None],
    said: str,
) -> None:
    lies(images, index)
    version = built(alice.tenant, **IMAGE)
    assert version.state == "failed"
    assert said in version.problem
    assert store().digests() == []


def test_a_provider_that_tells_no_digest_of_the_image_is_not_used(
    alice: Caller, index: PackageIndex, images: Liar
) -> None:
    tells(images, index)
    honest: ExecutionResult = images.module.behaviour["run"]()
    images.does(
        "run", lambda: ExecutionResult(honest.stdout, "", 0, 0.1, metadata={"image_digest": ""})
    )
    version = built(alice.tenant, **IMAGE)
    assert version.state == "failed"
    assert "digest" in version.problem


def test_a_tenants_own_image_is_refused_through_the_api(
    alice: Caller, index: PackageIndex, images: Liar, settings: Any
) -> None:
    tells(images, index)
    client = builder(alice).client
    body = {"name": "based", "declaration": {"base": "image:secrets"}}
    answer = client.post(URL, body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "base"), answer.content
    answer = client.post(URL, {"name": "based", "declaration": {"base": "image:own"}})
    assert answer.status_code == 202, answer.content
    answer = client.post(f"{URL}/based/builds", {"declaration": {"base": "image:secrets"}})
    assert answer.status_code in (400, 409), answer.content
