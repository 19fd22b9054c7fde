"""Templates of packages in Pods: images that the pool pushes, and that the nodes really pull."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from providers.errors import InvalidConfiguration, RateLimited
from providers.runtime.launchers import container_guest
from providers.sandbox import KeptSandbox
from providers.templates.declaration import Declaration
from providers.templates.lock import Lock
from providers.templates.store import TemplateStore
from providers.values import Command, Job, SandboxSpec
from tests.support.image_registry import (
    DOCKER_MANIFEST,
    PASSWORD,
    USER,
    PackedImage,
    Registry,
    hidden_layer,
    packed,
    program_layer,
    python_layer,
    registry,
    upper_layer,
)
from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import over_kubernetes, prepared_namespace
from tests.support.package_index import PackageIndex, make_wheel, package_index
from tests.support.pool_service import provider_of
from tests.support.required import require
from tests.support.template_images import BasedPool, fetch, long_wait_for_images

__all__ = ["long_wait_for_images"]

CREDENTIAL = f"{USER}:{PASSWORD}"
TEMPLATES = "templates"


@pytest.fixture(autouse=True, scope="module")
def reachable_loopback() -> Iterator[None]:
    with override_settings(PROVIDER_ALLOWED_NETWORKS=["127.0.0.0/8"]):
        yield


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture(scope="module")
def base() -> PackedImage:
    """Of Docker's kind, with layers whose order shows."""
    layers = [python_layer(), program_layer("env"), hidden_layer(), upper_layer()]
    return packed(layers, DOCKER_MANIFEST, is_zipped=False, Env=["PATH=/usr/bin:/bin"])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, base: PackedImage) -> Iterator[Registry]:
    """A registry of images that lets one user in, with the base in it."""
    with registry(tmp_path_factory.mktemp("registry"), has_users=True) as running:
        running.push("base", base)
        yield running


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, images: Registry) -> str:
    """A namespace whose Pods may pull."""
    name = prepared_namespace(cluster)
    auth = {"auth": base64.b64encode(CREDENTIAL.encode()).decode()}
    document = json.dumps({"auths": {images.host: auth}}).encode()
    secret = {
        "metadata": {"name": "registry"},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": base64.b64encode(document).decode()},
    }
    cluster.request("POST", f"/api/v1/namespaces/{name}/secrets", secret)
    return name


@pytest.fixture(scope="module")
def kubeconfig(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = cluster.kubeconfig(tmp_path_factory.mktemp("config") / "kubeconfig")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(path))
        yield path


def settings_of(images: Registry, **changes: Any) -> dict[str, Any]:
    return {
        "base_python_image": f"{images.host}/base:1",
        "base_nodejs_image": f"{images.host}/base:1",
        "kubernetes_pull_secret": "registry",
        "kubernetes_registry": f"{images.url}/{TEMPLATES}",
        "kubernetes_registry_credential": CREDENTIAL,
        "pool_size": 1,
        **changes,
    }


@contextmanager
def pool_of(images: Registry, folder: Path, namespace: str, **changes: Any) -> Iterator[BasedPool]:
    pool = BasedPool("kubernetes", folder, namespace=namespace, **settings_of(images, **changes))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool(
    kubeconfig: Path, images: Registry, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BasedPool]:
    with pool_of(images, tmp_path_factory.mktemp("data"), namespace) as opened:
        yield opened


def wheel_template(pool: BasedPool, index: PackageIndex, name: str, **more: Any) -> str:
    """Build a template of one wheel, which has a module and a program; return its digest."""
    files = {
        f"{name}.py": f"VALUE = '{name}'\ndef main():\n    print('program', VALUE)\n",
        f"{name}-1.0.dist-info/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    file_name = f"{name}-1.0-py3-none-any.whl"
    index.add_file(file_name, make_wheel(name, files=files))
    return pool.build(Lock.parse(index.pylock(file_name)), python=(name,), **more)


def npm_lock(index: PackageIndex, name: str) -> Lock:
    index.add_npm(name, "1.0.0", {"index.js": f"module.exports = 'from {name}';\n"})
    ((_, found),) = index.npm[name]["versions"].items()
    described = {
        "version": "1.0.0",
        "resolved": found["dist"]["tarball"],
        "integrity": found["dist"]["integrity"],
    }
    packages = {"": {}, f"node_modules/{name}": described}
    return Lock.parse(npm=json.dumps({"packages": packages}))


def test_a_run_imports_its_packages_and_another_template_has_its_own(
    pool: BasedPool, images: Registry, index: PackageIndex, base: PackedImage
) -> None:
    first, second = (wheel_template(pool, index, name) for name in ("alpha", "beta"))
    code = (
        "import subprocess, alpha; print(alpha.VALUE, alpha.__file__, flush=True); "
        "subprocess.run(['alpha']); print(open('/etc/of-the-image').read(), end=''); "
        "import os; print(os.path.exists('/etc/hidden'))"
    )
    result = pool.run(code, first)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"alpha /opt/cofferdam/{first}/lib/")
    # Of the image's layers the upper one wins, and hides what it is to hide.
    assert lines[1:] == ["program alpha", "upper", "False"]
    assert pool.run("import beta; print(beta.VALUE)", second).stdout == "beta\n"
    assert "No module named 'alpha'" in pool.run("import alpha", second).stderr
    own, other = (
        images.manifest(TEMPLATES, tag)
        for digest in (first, second)
        for tag in images.tags(TEMPLATES)
        if digest[:24] in tag
    )
    assert own["layers"][:-1] == other["layers"][:-1] == base.document["layers"]
    assert own["layers"][-1] != other["layers"][-1]


def test_a_template_is_pushed_once(pool: BasedPool, images: Registry, index: PackageIndex) -> None:
    digest = wheel_template(pool, index, "once")
    pushes = images.requests("PUT", f"/v2/{TEMPLATES}/manifests/")
    for _ in range(2):
        result = pool.run("import once; print(once.VALUE)", digest)
        assert result.stdout == "once\n", result.stderr
    assert images.requests("PUT", f"/v2/{TEMPLATES}/manifests/") == pushes + 1
    pushed = [tag for tag in images.tags(TEMPLATES) if digest[:24] in tag]
    assert len(pushed) == 1
    answer = images.client.head(
        f"/{TEMPLATES}/manifests/{pushed[0]}", headers={"Accept": DOCKER_MANIFEST}
    )
    # The record of a run names the image that it had.
    assert result.metadata["image_digest"] == answer.headers["Docker-Content-Digest"]


def test_node_finds_npm_packages_of_a_template(
    kubeconfig: Path, images: Registry, namespace: str, index: PackageIndex, tmp_path: Path
) -> None:
    require("node")
    images.push("node", packed([python_layer(), program_layer("node")], is_zipped=False))
    with pool_of(images, tmp_path, namespace, base_nodejs_image=f"{images.host}/node:1") as pool:
        digest = pool.build(npm_lock(index, "gamma"), npm=("gamma",))
        result = pool.run("console.log(require('gamma'))", digest, "nodejs")
        assert result.stdout == "from gamma\n", result.stderr


def test_a_template_is_based_on_an_image_of_its_own(
    pool: BasedPool, images: Registry, index: PackageIndex, base: PackedImage
) -> None:
    name = f"image:{images.push('other', base, '2')}"
    facts = pool.look_at(name)
    assert facts.base.image == base.digest
    assert facts.base.interpreter == "/usr/bin/python3"
    digest = wheel_template(pool, index, "based", base=facts.base)
    result = pool.run("import based, sys; print(based.VALUE, sys.prefix)", digest)
    assert result.stdout == f"based /opt/cofferdam/{digest}\n", result.stderr
    # The name means another image now.
    images.push("other", packed([python_layer()]), "2")
    again = wheel_template(pool, index, "again", base=facts.base)
    with pytest.raises(InvalidConfiguration, match="has changed since the template was built"):
        pool.run("print(1)", again)


def test_packages_of_debian_are_refused(pool: BasedPool, images: Registry) -> None:
    facts = pool.look_at(f"image:{images.host}/base:1")
    digest = pool.build(base=facts.base)
    (pool.store.path(digest) / "debs").mkdir()
    with pytest.raises(InvalidConfiguration, match="apt packages need Docker"):
        pool.run("print(1)", digest)


def test_a_template_that_is_not_used_is_removed_from_the_registry(
    kubeconfig: Path, images: Registry, namespace: str, index: PackageIndex, tmp_path: Path
) -> None:
    before = images.tags(TEMPLATES)
    with pool_of(images, tmp_path, namespace) as pool:
        digest = wheel_template(pool, index, "alpha")
        assert pool.run("import alpha", digest).exit_code == 0
        (pushed,) = set(images.tags(TEMPLATES)) - set(before)
        assert digest[:24] in pushed
    assert images.tags(TEMPLATES) == before


def test_a_caller_does_not_wait_for_an_image_that_takes_long(
    kubeconfig: Path,
    pool: BasedPool,
    images: Registry,
    index: PackageIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = wheel_template(pool, index, "slow")
    pushes = images.requests("PUT", f"/v2/{TEMPLATES}/manifests/")
    monkeypatch.setattr(container_guest, "MAKING_SECONDS", 0.001)
    with pytest.raises(RateLimited) as busy:
        pool.run("import slow", digest)
    assert busy.value.field == "template"
    monkeypatch.setattr(container_guest, "MAKING_SECONDS", 120.0)
    result = pool.run("import slow; print(slow.VALUE)", digest)
    assert result.stdout == "slow\n", result.stderr
    assert images.requests("PUT", f"/v2/{TEMPLATES}/manifests/") == pushes + 1


def test_a_session_has_its_packages_and_no_pod_or_log_a_credential(
    cluster: Cluster, images: Registry, namespace: str, index: PackageIndex, tmp_path: Path
) -> None:
    constants = {"providers.runtime.launchers.container_guest.MAKING_SECONDS": 120.0}
    file_name = "alpha-1.0-py3-none-any.whl"
    program = "[console_scripts]\nalpha = alpha:main\n"
    files = {
        "alpha.py": "VALUE = 42\ndef main():\n    print('program', VALUE)\n",
        "alpha-1.0.dist-info/entry_points.txt": program,
    }
    index.add_file(file_name, make_wheel("alpha", files=files))
    lock = Lock.parse(index.pylock(file_name))
    with over_kubernetes(
        cluster,
        tmp_path,
        namespace=namespace,
        constants=constants,
        PROVIDER_ALLOWED_NETWORKS="127.0.0.0/8",
        LOG_LEVEL="DEBUG",
    ) as service:
        store = TemplateStore(service.data_dir)
        built = store.build(Declaration(python=("alpha",)), lock, fetch, lambda line: None)
        settings = settings_of(images, queue_timeout=120, timeout=60)
        with provider_of(service.url, **settings) as provider:
            spec = SandboxSpec(kept=True, digest=built.digest, seconds=300)
            kept = provider.open(spec, "alice")
            assert isinstance(kept, KeptSandbox)
            with closing(kept):
                assert kept.run(Job("import alpha", timeout=60)).exit_code == 0
                assert kept.run(Job("print(alpha.VALUE)", timeout=60)).stdout == "42\n"
                process = kept.processes.start(Command(["alpha"]))
                output: list[bytes] = []
                kept.processes.follow(process.pid, lambda event: output.append(event.data))
                assert b"".join(output) == b"program 42\n"
                pods = cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods")
            sandbox = provider.open(SandboxSpec(digest=built.digest), "alice")
            with closing(sandbox):
                assert sandbox.run(Job("import alpha", timeout=60)).exit_code == 0
            said = [
                json.dumps(pods),
                service.service.output,
                json.dumps(provider.health_check().details),
            ]
    encoded = base64.b64encode(CREDENTIAL.encode()).decode()
    assert f"{images.host}/{TEMPLATES}@sha256:" in said[0]
    for each in said:
        assert PASSWORD not in each
        assert encoded not in each
