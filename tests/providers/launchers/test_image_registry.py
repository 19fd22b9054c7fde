"""The client of registries: what it copies and pushes, and what it refuses to believe."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.runtime.launchers import image_registry
from providers.runtime.launchers.image_registry import (
    Descriptor,
    ImageRegistry,
    Missing,
    Reference,
    Repository,
)
from tests.support.image_registry import (
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    PASSWORD,
    USER,
    Answer,
    LyingRegistry,
    PackedImage,
    Received,
    Registry,
    described,
    digest_of,
    index_of,
    lying_registry,
    packed,
    registry,
)
from tests.support.images import ARCHITECTURE, layer

CREDENTIAL = f"{USER}:{PASSWORD}"
LOWER = layer(("lower", b"lower" * 1000))
UPPER = layer(("upper", b"upper"))

Step = Callable[[ImageRegistry], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def reachable_loopback() -> Iterator[None]:
    with override_settings(PROVIDER_ALLOWED_NETWORKS=["127.0.0.0/8"]):
        yield


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture(scope="module")
def closed_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("closed"), has_users=True) as running:
        yield running


@pytest.fixture(scope="module")
def image() -> PackedImage:
    return packed([LOWER, UPPER])


@pytest.fixture
def liar(image: PackedImage) -> Iterator[LyingRegistry]:
    with lying_registry(image) as served:
        yield served


def with_client(url: str, step: Step, folder: Path, credential: str = "") -> Any:
    """What a step comes to with a client of the repository `templates`."""

    async def work() -> Any:
        client = ImageRegistry(f"{url}/templates", credential, folder)
        try:
            return await step(client)
        finally:
            await client.close()

    return asyncio.run(work())


def copying(name: str, tag: str = "1") -> Step:
    """The step that copies an image, and gives it the tag `copy`."""

    async def step(client: ImageRegistry) -> str:
        found = await client.resolve(Reference.parse(name, client.repository), ARCHITECTURE)
        config = await client.read_config(found)
        for each in found.layers:
            await client.copy_blob(found.repository, each)
        content = json.dumps(config).encode()
        described = Descriptor(found.config.media_type, digest_of(content), len(content))
        await client.put_blob(described, io.BytesIO(content))
        document = {
            "schemaVersion": 2,
            "mediaType": found.media_type,
            "config": described.to_json(),
            "layers": [each.to_json() for each in found.layers],
        }
        return await client.put_manifest(tag, found.media_type, json.dumps(document).encode())

    return step


def resolving(name: str) -> Step:
    async def step(client: ImageRegistry) -> Any:
        found = await client.resolve(Reference.parse(name, client.repository), ARCHITECTURE)
        await client.read_config(found)
        for each in found.layers:
            await client.copy_blob(found.repository, each)
        return found

    return step


@pytest.mark.parametrize("media_type", [OCI_MANIFEST, DOCKER_MANIFEST])
def test_an_image_is_copied_within_a_registry_without_its_layers(
    open_registry: Registry, tmp_path: Path, media_type: str
) -> None:
    image = packed([LOWER, UPPER], media_type)
    name = open_registry.push("base", image, media_type[-20:-5].replace("+", "."))
    before = open_registry.requests("PATCH", "/v2/templates/")
    digest = with_client(open_registry.url, copying(name, "same"), tmp_path)
    assert open_registry.manifest("templates", "same")["layers"] == image.document["layers"]
    assert open_registry.requests("GET", "/v2/base/blobs/sha256") <= 1 + 1, digest
    assert open_registry.requests("PATCH", "/v2/templates/") == before


def test_an_image_is_copied_from_another_registry(
    open_registry: Registry, closed_registry: Registry, image: PackedImage, tmp_path: Path
) -> None:
    name = open_registry.push("elsewhere", image)
    with_client(closed_registry.url, copying(name), tmp_path, CREDENTIAL)
    assert closed_registry.manifest("templates", "1")["layers"] == image.document["layers"]
    for each in image.document["layers"]:
        copied = closed_registry.client.get(f"/templates/blobs/{each['digest']}")
        assert digest_of(copied.content) == each["digest"]
    assert not list(tmp_path.iterdir())


def test_of_an_index_it_is_the_image_for_the_nodes(
    open_registry: Registry, image: PackedImage, tmp_path: Path
) -> None:
    other = packed([UPPER])
    open_registry.push("several", other, "other")
    name = open_registry.push("several", image)
    open_registry.push_manifest("several", "1", OCI_INDEX, index_of(other, image))
    found = with_client(open_registry.url, resolving(name), tmp_path)
    assert found.digest == image.digest


def test_an_index_without_an_image_for_the_nodes_is_refused(
    open_registry: Registry, image: PackedImage, tmp_path: Path
) -> None:
    async def step(client: ImageRegistry) -> Any:
        name = f"{open_registry.host}/foreign:1"
        return await client.resolve(Reference.parse(name, client.repository), "riscv64")

    open_registry.push("foreign", image)
    open_registry.push_manifest("foreign", "1", OCI_INDEX, index_of(image))
    with pytest.raises(InvalidConfiguration, match="linux/riscv64"):
        with_client(open_registry.url, step, tmp_path)


def test_an_image_that_is_missing_is_named(open_registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"/base has no image nothing\. Push it there"):
        with_client(open_registry.url, resolving(f"{open_registry.host}/base:nothing"), tmp_path)


@pytest.mark.parametrize("credential", ["", "pusher:wrong-of-a-test"])
def test_a_wrong_credential_is_named_and_not_shown(
    closed_registry: Registry, image: PackedImage, tmp_path: Path, credential: str
) -> None:
    closed_registry.push("base", image)
    with pytest.raises(InvalidConfiguration, match="user:password of an account") as refused:
        with_client(
            closed_registry.url, copying(f"{closed_registry.host}/base:1"), tmp_path, credential
        )
    assert refused.value.field == "kubernetes_registry_credential"
    assert "wrong-of-a-test" not in str(refused.value)


def test_a_deleted_image_is_gone_and_deletion_that_is_not_allowed_is_no_error(
    open_registry: Registry, image: PackedImage, tmp_path: Path
) -> None:
    def deletes(digest: str) -> Step:
        async def step(client: ImageRegistry) -> bool:
            return await client.delete_manifest(digest)

        return step

    digest = with_client(
        open_registry.url, copying(open_registry.push("base", image), "old"), tmp_path
    )
    assert "old" in open_registry.tags("templates")
    assert with_client(open_registry.url, deletes(digest), tmp_path) is True
    assert "old" not in open_registry.tags("templates")
    # A second time there is nothing to delete.
    assert with_client(open_registry.url, deletes(digest), tmp_path) is True
    with registry(tmp_path / "strict", may_delete=False) as strict:
        digest = with_client(
            strict.url, copying(open_registry.push("base", image), "old"), tmp_path
        )
        assert with_client(strict.url, deletes(digest), tmp_path) is False


def test_a_token_is_fetched_for_each_repository(
    liar: LyingRegistry, image: PackedImage, tmp_path: Path
) -> None:
    def asks_for_a_token(request: Received) -> Answer | None:
        if request.path.startswith("/token"):
            return Answer(200, {}, b'{"token": "of-this-test"}')
        if request.headers.get("Authorization") == "Bearer of-this-test":
            return None
        challenge = f'Bearer realm="{liar.url}/token",service="a registry"'
        return Answer(401, {"WWW-Authenticate": challenge})

    liar.lie = asks_for_a_token
    with_client(liar.url, copying(f"{liar.host}/base:1"), tmp_path, CREDENTIAL)
    tokens = [each for each in liar.received if each.path.startswith("/token")]
    assert all(each.headers["Authorization"].startswith("Basic ") for each in tokens)
    assert "scope=repository%3Abase%3Apull" in tokens[0].path
    assert any("templates%3Apull%2Cpush" in each.path for each in tokens)
    assert len(tokens) == len({each.path for each in tokens})


def _manifest(image: PackedImage, **changes: Any) -> Answer:
    content = json.dumps({**image.document, **changes}).encode()
    return Answer(200, {"Content-Type": image.media_type}, content)


LAYER = "/blobs/" + packed([LOWER, UPPER]).document["layers"][0]["digest"]
# What is answered to which requests, and the reason that is given.
LIES: dict[str, tuple[str, str, Callable[[PackedImage], Answer], str]] = {
    "another-layer": (
        *("GET", LAYER),
        lambda image: Answer(200, {}, b"x" * 10),
        "another content",
    ),
    "endless-layer": (
        *("GET", LAYER),
        lambda image: Answer(200, {}, b"x" * 65536, is_endless=True),
        "is larger than its manifest says",
    ),
    "endless-manifest": (
        *("GET", "/manifests/"),
        lambda image: Answer(200, {"Content-Type": OCI_MANIFEST}, b" " * 65536, is_endless=True),
        "more than 4 MiB",
    ),
    "another-media-type": (
        *("GET", "/manifests/"),
        lambda image: Answer(200, {"Content-Type": "text/html"}, image.manifest),
        "and no image",
    ),
    "two-media-types": (
        *("GET", "/manifests/"),
        lambda image: _manifest(image, mediaType=DOCKER_MANIFEST),
        "two media types",
    ),
    "no-json": (
        *("GET", "/manifests/"),
        lambda image: Answer(200, {"Content-Type": OCI_MANIFEST}, b"[" * 100_000),
        "not JSON",
    ),
    "no-sha256": (
        *("GET", "/manifests/"),
        lambda image: _manifest(
            image, config={**image.document["config"], "digest": "sha256:../../secrets"}
        ),
        "no sha256",
    ),
    "negative-size": (
        *("GET", "/manifests/"),
        lambda image: _manifest(image, config={**image.document["config"], "size": -1}),
        "no size",
    ),
    "too-many-layers": (
        *("GET", "/manifests/"),
        lambda image: _manifest(image, layers=image.document["layers"][:1] * 500),
        "no layers, or more",
    ),
    "other-layers": (
        *("GET", "/manifests/"),
        lambda image: _manifest(image, layers=image.document["layers"][:1]),
        "is not that of it",
    ),
    "unknown-layers": (
        *("GET", "/manifests/"),
        lambda image: _manifest(image, layers=[described("application/x-thing", b"")]),
        "cannot be copied",
    ),
    "index-of-indexes": (
        *("GET", "/manifests/"),
        lambda image: Answer(200, {"Content-Type": OCI_INDEX}, index_of(image)),
        "another digest",
    ),
    "endless-redirects": (
        *("GET", "/blobs/sha256"),
        lambda image: Answer(307, {"Location": LAYER}),
        "redirects do not end",
    ),
    "redirect-to-nowhere": ("GET", LAYER, lambda image: Answer(307), "leads to no address"),
    "redirect-to-this-network": (
        *("GET", LAYER),
        lambda image: Answer(307, {"Location": "https://169.254.169.254/secrets"}),
        "may not connect to",
    ),
    "upload-elsewhere": (
        *("POST", "/uploads/"),
        lambda image: Answer(202, {"Location": "https://registry.invalid/upload"}),
        "uploaded to another server",
    ),
    "another-manifest-kept": (
        *("PUT", "/manifests/"),
        lambda image: Answer(201, {"Docker-Content-Digest": image.document["config"]["digest"]}),
        "has stored another manifest",
    ),
    "broken": ("GET", "/manifests/", lambda image: Answer(500, {}, b"x"), "status 500"),
    "redirected-manifest": (
        *("GET", "/manifests/"),
        lambda image: Answer(302, {"Location": "http://127.0.0.1:1/"}),
        "status 302",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_registry_that_lies_is_refused(
    liar: LyingRegistry, image: PackedImage, tmp_path: Path, lie: str
) -> None:
    method, part, answer, reason = LIES[lie]

    def answers(request: Received) -> Answer | None:
        if request.method == "HEAD":
            return Answer(404)
        is_asked = request.method == method and part in request.path
        return answer(image) if is_asked else None

    liar.lie = answers
    with pytest.raises(ProviderUnavailable, match=reason) as refused:
        with_client(liar.url, copying(f"{liar.host}/base:1"), tmp_path, CREDENTIAL)
    assert refused.value.field == "kubernetes_registry"
    assert PASSWORD not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_credential_is_sent_to_no_other_server(
    liar: LyingRegistry, image: PackedImage, tmp_path: Path
) -> None:
    with lying_registry(image) as other:

        def redirects(request: Received) -> Answer | None:
            if request.method == "GET" and "/blobs/" in request.path:
                return Answer(307, {"Location": f"{other.url}{request.path}"})
            if request.method == "HEAD":
                return Answer(404)
            if "Authorization" not in request.headers:
                return Answer(401, {"WWW-Authenticate": 'Basic realm="test"'})
            return None

        liar.lie = redirects
        with_client(liar.url, copying(f"{liar.host}/base:1"), tmp_path, CREDENTIAL)
        assert other.received
        assert not any("Authorization" in each.headers for each in other.received)
        # Nor to a registry that only has the base image.
        other.received.clear()
        other.lie = lambda request: (
            Answer(401, {"WWW-Authenticate": 'Basic realm="test"'})
            if "Authorization" not in request.headers
            else None
        )
        with pytest.raises(SandboxError, match="not known"):
            with_client(liar.url, copying(f"{other.host}/base:1"), tmp_path, CREDENTIAL)
        assert not any("Authorization" in each.headers for each in other.received)


def test_an_error_shows_no_text_of_the_registry(liar: LyingRegistry, tmp_path: Path) -> None:
    """It may quote what it was sent."""

    def quotes(request: Received) -> Answer:
        sent = request.headers.get("Authorization", "")
        if not sent:
            return Answer(401, {"WWW-Authenticate": 'Basic realm="test"'})
        errors = [{"code": "UNKNOWN", "message": sent}, {"code": sent, "message": ""}]
        return Answer(500, {}, json.dumps({"errors": errors}).encode())

    liar.lie = quotes
    with pytest.raises(ProviderUnavailable, match="status 500: UNKNOWN") as failed:
        with_client(liar.url, resolving(f"{liar.host}/base:1"), tmp_path, CREDENTIAL)
    assert "Basic" not in str(failed.value)


def test_a_registry_that_is_silent_is_given_up(
    liar: LyingRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_registry, "CALL_SECONDS", 0.2)
    liar.lie = lambda request: Answer(200, {"Content-Type": OCI_MANIFEST}, b"{", is_silent=True)
    with pytest.raises(ProviderUnavailable, match="does not answer"):
        with_client(liar.url, resolving(f"{liar.host}/base:1"), tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("registry.example", "is not a repository"),
        ("registry.example/Name", "is not a repository"),
        ("registry.example/a/../b", "is not a repository"),
        ("ftp://registry.example/name", "is not a repository"),
        ("user@registry.example/name", "without user"),
        ("http://registry.example/name", "PROVIDER_PLAIN_HTTP"),
        ("10.1.2.3/name", "not a public address"),
    ],
)
def test_what_names_no_repository_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InvalidConfiguration, match=reason) as refused:
        Repository.parse(name)
    assert refused.value.field == "kubernetes_registry"


@pytest.mark.parametrize(
    ("name", "origin", "repository", "reference"),
    [
        ("python", "https://registry-1.docker.io", "library/python", "latest"),
        ("cofferdam/python:1", "https://registry-1.docker.io", "cofferdam/python", "1"),
        ("registry.example/a/b:c", "https://registry.example", "a/b", "c"),
        ("127.0.0.1:5000/a", "http://127.0.0.1:5000", "a", "latest"),
        (f"quay.io/a:b@sha256:{'0' * 64}", "https://quay.io", "a", f"sha256:{'0' * 64}"),
        ("own.example:1/a:b", "https://own.example:1", "a", "b"),
    ],
)
def test_the_name_of_an_image_is_read_as_nodes_read_it(
    name: str, origin: str, repository: str, reference: str
) -> None:
    found = Reference.parse(name, Repository.parse("own.example:1/templates"))
    assert (found.repository.origin, found.repository.name) == (origin, repository)
    assert found.reference == reference


@pytest.mark.parametrize("name", ["registry.example/a/../b:1", "a:b:c", "a@sha256:1", "a b", ""])
def test_what_names_no_image_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfiguration, match="is not the name of an image"):
        Reference.parse(name, Repository.parse("own.example/templates"))
