"""The images that a pool makes of templates, without Pods: what it pushes, and what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import io
import platform
import secrets
import tarfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.launchers.container_guest import Image
from providers.runtime.launchers.kubernetes.settings import KubernetesSettings
from providers.runtime.launchers.kubernetes.templates import PodTemplates
from providers.runtime.service.settings import ServiceSettings
from providers.templates.declaration import Declaration
from providers.templates.lock import Lock
from providers.templates.store import TemplateStore
from tests.support.image_registry import (
    PASSWORD,
    USER,
    Answer,
    PackedImage,
    Registry,
    lying_registry,
    packed,
    registry,
)
from tests.support.images import layer
from tests.support.package_index import make_wheel, package_index
from tests.support.template_images import fetch, long_wait_for_images

__all__ = ["long_wait_for_images"]

CREDENTIAL = f"{USER}:{PASSWORD}"

Work = Callable[[PodTemplates], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True, scope="module")
def reachable_loopback() -> Iterator[None]:
    with override_settings(PROVIDER_ALLOWED_NETWORKS=["127.0.0.0/8"]):
        yield


@pytest.fixture(scope="module")
def base() -> PackedImage:
    return packed([layer(("lower", b"lower")), layer(("upper", b"upper"))])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, base: PackedImage) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("registry"), has_users=True) as running:
        running.push("base", base)
        yield running


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path]]:
    """Two templates: the digest and the folder of each."""
    store, found = TemplateStore(tmp_path_factory.mktemp("store")), []
    with package_index() as index:
        for name in ("alpha", "beta"):
            index.add_file(f"{name}-1.0-py3-none-any.whl", make_wheel(name))
            lock = Lock.parse(index.pylock(f"{name}-1.0-py3-none-any.whl"))
            declared = Declaration(python=(name,))
            digest = store.build(declared, lock, fetch, lambda line: None).digest
            found.append((digest, store.path(digest)))
    return found


def usual(host: str, digest: str = "") -> Image:
    """The base as a pool knows it that has looked into it."""
    versions = {"python": platform.python_version()}
    return Image(f"{host}/base:1", digest, {"python": "python3"}, versions, b"", -1)


def with_templates(work: Work, url: str, folder: Path, **settings: Any) -> Any:
    """What work comes to with the templates of a pool, whose repository is at a registry."""
    given = {"registry": f"{url}/templates" if url else "", "data_dir": folder, **settings}

    async def probe(name: str) -> tuple[dict[str, Any], str]:
        raise AssertionError(f"{name} is looked into")

    async def run() -> Any:
        templates = PodTemplates(KubernetesSettings(**given), probe)
        templates.know_machine(platform.machine())
        try:
            return await work(templates)
        finally:
            await templates.close()

    return asyncio.run(run())


def making(image: Image, *folders: tuple[str, Path]) -> Work:
    async def work(templates: PodTemplates) -> list[Image]:
        return [await templates.make(image, digest, folder) for digest, folder in folders]

    return work


def test_the_last_layer_has_the_files_and_is_the_same_each_time(
    images: Registry, folders: list[tuple[str, Path]], base: PackedImage, tmp_path: Path
) -> None:
    (digest, _), _ = folders
    work = making(usual(images.host), folders[0])
    settings = {"registry_credential": CREDENTIAL, "pool": "same"}
    (first,) = with_templates(work, images.url, tmp_path, **settings)
    uploads = images.requests("PUT", "/v2/templates/blobs/uploads/")
    # As another process of the pool does it.
    (second,) = with_templates(work, images.url, tmp_path, **settings)
    assert (first.id, first.folder) == (second.id, f"/opt/cofferdam/{digest}")
    assert images.requests("PUT", "/v2/templates/blobs/uploads/") == uploads
    assert first.id == f"{images.host}/templates@{first.digest}"
    manifest = images.manifest("templates", first.digest)
    config = images.client.get(f"/templates/blobs/{manifest['config']['digest']}").json()
    assert len(config["rootfs"]["diff_ids"]) == len(manifest["layers"]) == 3
    blob = images.client.get(f"/templates/blobs/{manifest['layers'][-1]['digest']}").content
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob))) as archive:
        assert any(name.endswith("/alpha.py") for name in archive.getnames())
    assert not list(tmp_path.iterdir())


def test_languages_of_one_image_share_it(
    images: Registry, folders: list[tuple[str, Path]], tmp_path: Path
) -> None:
    async def work(templates: PodTemplates) -> None:
        python = await templates.make(usual(images.host), *folders[0])
        pushes = images.requests("PUT", "/v2/templates/manifests/")
        bash = await templates.make(usual(images.host), *folders[0])
        assert bash.id == python.id
        assert images.requests("PUT", "/v2/templates/manifests/") == pushes
        # What was removed is pushed again.
        await templates.drop(python)
        again = await templates.make(usual(images.host), *folders[0])
        assert images.manifest("templates", again.digest)

    with_templates(work, images.url, tmp_path, registry_credential=CREDENTIAL, pool="shared")


def test_it_is_made_of_the_image_that_was_looked_into(
    images: Registry, folders: list[tuple[str, Path]], base: PackedImage, tmp_path: Path
) -> None:
    images.push("moved", base)
    images.push("moved", packed([layer(("other", b"other"))]))
    looked = Image(f"{images.host}/moved:1", base.digest, {}, usual("").versions, b"", -1)
    settings = {"registry_credential": CREDENTIAL}
    (made,) = with_templates(making(looked, folders[0]), images.url, tmp_path, **settings)
    assert images.manifest("templates", made.digest)["layers"][:2] == base.document["layers"]


def test_another_pool_does_not_remove_it(
    images: Registry, folders: list[tuple[str, Path]], tmp_path: Path
) -> None:
    work = making(usual(images.host), folders[0])
    (own, other) = (
        with_templates(work, images.url, tmp_path, registry_credential=CREDENTIAL, pool=pool)[0]
        for pool in ("own", "other")
    )
    before = images.tags("templates")

    async def drop(templates: PodTemplates) -> None:
        await templates.make(usual(images.host), *folders[0])
        await templates.drop(other)

    with_templates(drop, images.url, tmp_path, registry_credential=CREDENTIAL, pool="other")
    assert len(images.tags("templates")) == len(before) - 1
    assert images.manifest("templates", own.digest)


def test_a_registry_that_deletes_nothing_is_said_once(
    folders: list[tuple[str, Path]],
    base: PackedImage,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with registry(tmp_path / "registry", may_delete=False) as strict:
        strict.push("base", base)

        async def drop(templates: PodTemplates) -> None:
            for each in await making(usual(strict.host), *folders)(templates):
                await templates.drop(each)

        with_templates(drop, strict.url, tmp_path)
        assert len(strict.tags("templates")) == 2
    assert [each.message for each in caplog.records if "deletes no images" in each.message] == [
        "the registry deletes no images: remove those of templates there yourself"
    ]


def test_without_a_registry_a_template_is_refused_with_the_remedy(
    folders: list[tuple[str, Path]], tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfiguration, match="Name one that the pool may push") as refused:
        with_templates(making(usual("127.0.0.1:1"), folders[0]), "", tmp_path)
    assert refused.value.field == "kubernetes_registry"


def test_a_wrong_credential_is_named_and_shown_nowhere(
    images: Registry,
    folders: list[tuple[str, Path]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = f"{USER}:{secrets.token_hex(8)}"
    work = making(usual(images.host), folders[0])
    with pytest.raises(InvalidConfiguration, match="user:password of an account") as refused:
        with_templates(work, images.url, tmp_path, registry_credential=wrong)
    assert refused.value.field == "kubernetes_registry_credential"
    said = [
        str(refused.value),
        caplog.text,
        repr(KubernetesSettings(registry_credential=wrong)),
        repr(ServiceSettings.from_config({"kubernetes_registry_credential": wrong})),
    ]
    assert not any(wrong.partition(":")[2] in each for each in said)


def test_a_template_for_another_python_is_refused(
    images: Registry, folders: list[tuple[str, Path]], tmp_path: Path
) -> None:
    other = Image(f"{images.host}/base:1", "", {}, {"python": "3.7.1"}, b"", -1)
    with pytest.raises(InvalidConfiguration, match=r"and the image has python 3\.7\.1"):
        with_templates(making(other, folders[0]), images.url, tmp_path)


def test_an_image_for_other_machines_is_refused(
    images: Registry, folders: list[tuple[str, Path]], tmp_path: Path
) -> None:
    async def work(templates: PodTemplates) -> None:
        templates.know_machine("riscv64")
        await templates.make(usual(images.host), *folders[0])

    with pytest.raises(InvalidConfiguration, match="the nodes are linux and riscv64"):
        with_templates(work, images.url, tmp_path, registry_credential=CREDENTIAL)


def test_after_a_lie_of_the_registry_it_is_tried_again(
    folders: list[tuple[str, Path]], base: PackedImage, tmp_path: Path
) -> None:
    last = base.document["layers"][-1]["digest"]
    with lying_registry(base) as liar:

        async def work(templates: PodTemplates) -> list[Image]:
            liar.lie = lambda request: (
                Answer(404)
                if request.method == "HEAD"
                else Answer(200, {}, b"x")
                if request.path.endswith(last)
                else None
            )
            for _ in range(2):
                with pytest.raises(ProviderUnavailable, match="has another content"):
                    await making(usual(liar.host), folders[0])(templates)
            liar.lie = lambda request: None
            return [await templates.make(usual(liar.host), *folders[0])]

        assert len(with_templates(work, liar.url, tmp_path)) == 1
