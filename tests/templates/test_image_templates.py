"""Builds of templates whose base is an image, with packages of Debian, over a Docker engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from executions.capabilities.network.models import NetworkList
from executions.capabilities.templates import builds
from executions.capabilities.templates.models import TemplateVersion
from executions.capabilities.templates.names import store
from executions.runs.models import Execution
from providers.errors import InvalidConfiguration
from providers.manager import manager
from providers.services.settings_cache import forget_all
from providers.templates.sbom import cyclonedx
from tests.conftest import Caller
from tests.support.package_index import PackageIndex
from tests.support.pool_service import over_docker
from tests.support.processes import free_port
from tests.support.running import activate, run
from tests.support.template_images import (
    INSTALLED,
    DockerImages,
    docker_images,
    hello,
    make_deb,
    serve_debs,
)
from tests.support.templates import again, built

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]


@pytest.fixture(scope="module")
def images(engine: docker.DockerClient) -> Iterator[DockerImages]:
    with docker_images() as made:
        yield made


@pytest.fixture(scope="module")
def endpoint(images: DockerImages) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        data_dir = Path(folder, "data")
        data_dir.mkdir()
        allowed = {"NETWORK_ALLOWED_ADDRESSES": "127.0.0.0/8", "DATA_DIR": str(data_dir)}
        with over_docker(free_port(), Path(folder, "log"), **allowed) as pool:
            yield pool.url


@pytest.fixture
def image(endpoint: str, images: DockerImages, index: PackageIndex, settings: Any) -> str:
    """The name of an image whose only source of packages is the index."""
    # What another test has loaded looks for templates in a folder of that one's.
    manager.close()
    activate("self_managed", {"endpoint": endpoint, "pool_size": 1, "timeout": 120})
    sources = serve_debs(index, hello_of_a_test=hello(depends="of-hello"), of_hello=OF_HELLO)
    name = images.add({"etc/apt/sources.list": sources})
    settings.TEMPLATE_IMAGES = [name]
    return name


OF_HELLO = make_deb("of-hello", files={"/usr/share/of-hello": "x"})
HELLO: dict[str, Any] = {"apt": ["hello-of-a-test"]}


def test_a_template_of_an_image_has_packages_of_debian(
    alice: Caller, image: str, index: PackageIndex
) -> None:
    base = f"image:{image}"
    version = built(alice.tenant, base=base, run=[f"{INSTALLED} > said"], **HELLO)
    assert (version.state, version.problem) == ("ready", ""), version.log
    assert [(each.kind, each.name) for each in version.locked.packages] == [
        ("apt", "hello-of-a-test"),
        ("apt", "of-hello"),
    ]
    assert version.base["name"] == base
    assert version.base["image"].startswith("sha256:")
    assert version.base["image"] in version.log
    assert store().verify(version.digest) == ""
    answer = run(alice, f"import subprocess; subprocess.run([{INSTALLED!r}])", template="science")
    assert answer.json()["stdout"] == "hello\n", answer.content
    answer = run(alice, "print(open('said').read())", template="science")
    assert answer.json()["stdout"] == "hello\n\n", answer.content
    parts = cyclonedx("science", "1", version.digest, version.locked, {})
    assert parts["components"][0]["purl"] == "pkg:deb/debian/hello-of-a-test@1.0"
    listed = alice.client.get("/api/v1/templates").json()["results"][0]["versions"][0]
    assert listed["base"] == base
    # The same again: it is looked at, and nothing is resolved or fetched.
    asked, runs = len(index.requests), Execution.objects.count()
    second = again(version.template)
    assert (second.state, second.digest) == ("ready", version.digest), second.problem
    assert len(index.requests) == asked
    assert Execution.objects.count() == runs + 1


def test_a_base_that_has_changed_is_resolved_anew(
    alice: Caller, image: str, images: DockerImages, index: PackageIndex
) -> None:
    first = built(alice.tenant, base=f"image:{image}", **HELLO)
    assert first.state == "ready", first.problem
    images.change(image, {"etc/apt/sources.list": serve_debs(index), "etc/more": "x"})
    answer = run(alice, "print(1)", template="science@1")
    # What holds it already goes on with the image that it was built on.
    assert answer.status_code == 200 or "has changed since" in str(answer.content)
    second = again(first.template)
    assert second.state == "ready", second.problem
    assert second.digest != first.digest
    assert second.base["image"] != first.base["image"]


def test_a_package_whose_script_fails_fails_the_build(
    alice: Caller, image: str, index: PackageIndex
) -> None:
    serve_debs(index, evil=make_deb("evil", scripts={"postinst": "echo It fails >&2; exit 7"}))
    version = built(alice.tenant, base=f"image:{image}", apt=["evil"])
    assert version.state == "failed"
    assert "It fails" in version.problem
    assert store().digests() == []


def test_a_package_with_another_hash_than_its_lock_is_refused(
    alice: Caller, image: str, index: PackageIndex
) -> None:
    name = "hello-of-a-test_1.0_all.deb"
    index.files[name] = index.files[name][:-1] + b"!"
    version = built(alice.tenant, base=f"image:{image}", **HELLO)
    assert version.state == "failed"
    assert "another hash than its lock" in version.problem
    assert store().digests() == []


def test_packages_come_only_from_hosts_of_the_network_lists(
    alice: Caller, image: str, index: PackageIndex
) -> None:
    NetworkList.objects.all().delete()
    forget_all()
    asked = len(index.requests)
    version = built(alice.tenant, base=f"image:{image}", **HELLO)
    assert version.state == "failed"
    assert "cannot be reached" in version.problem
    assert len(index.requests) == asked


def test_a_tenant_names_no_image_but_those_of_the_setting(
    alice: Caller, image: str, settings: Any
) -> None:
    settings.TEMPLATE_IMAGES = []
    with pytest.raises(InvalidConfiguration, match="TEMPLATE_IMAGES") as refused:
        built(alice.tenant, base=f"image:{image}")
    assert refused.value.field == "base"
    assert not TemplateVersion.objects.exists()
    # The installation's may.
    common = built(None, "common", base=f"image:{image}", files={"a": "b"})
    assert common.state == "ready", common.problem
    assert run(alice, "print(1)", template="common").json()["stdout"] == "1\n"


def test_a_setting_that_became_narrower_holds_at_once(
    alice: Caller, image: str, settings: Any
) -> None:
    version = built(alice.tenant, base=f"image:{image}", files={"a": "b"})
    assert version.state == "ready", version.problem
    assert run(alice, "print(1)", template="science").status_code == 200
    settings.TEMPLATE_IMAGES = []
    answer = run(alice, "print(1)", template="science")
    assert answer.status_code == 400
    assert "TEMPLATE_IMAGES" in answer.json()["error"]["message"]
    answer = alice.client.post("/api/v1/sessions", {"template": "science"})
    assert answer.status_code == 400, answer.content
    with pytest.raises(InvalidConfiguration):
        builds.request_build(version.template, "test")
