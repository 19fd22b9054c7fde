"""Templates whose base is an imported image or another interpreter, without an engine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers.errors import InvalidConfiguration
from providers.runtime.launchers.images import ImageStore
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.lock import Lock
from providers.templates.store import python_release
from tests.support.images import MARKER, layer, machine_archive, machine_layers, oci_archive
from tests.support.package_index import PackageIndex, make_wheel, package_index
from tests.support.required import require
from tests.support.template_images import BasedPool, add_deb, hello

IMAGE = "image:own"


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture(scope="module", params=["runc", "gvisor"])
def based(request: pytest.FixtureRequest) -> Iterator[BasedPool]:
    require({"gvisor": "runsc"}.get(request.param, request.param))
    if os.geteuid() != 0:
        pytest.skip("runc makes containers as root")
    data_dir = Path(tempfile.mkdtemp(dir="/var/tmp"))
    data_dir.chmod(0o755)
    (data_dir / "run").mkdir()
    try:
        ImageStore(data_dir).add("own", machine_archive(data_dir / "own.tar"))
        pool = BasedPool(request.param, data_dir)
        try:
            yield pool
        finally:
            pool.close()
    finally:
        shutil.rmtree(data_dir)


def wheel(index: PackageIndex, name: str) -> Lock:
    file_name = f"{name}-1.0-py3-none-any.whl"
    index.add_file(file_name, make_wheel(name))
    return Lock.parse(index.pylock(file_name))


def test_a_template_has_the_root_of_the_image_and_its_packages(
    based: BasedPool, index: PackageIndex
) -> None:
    facts = based.look_at(IMAGE)
    assert facts.base.python == python_release()
    assert not facts.has_apt
    digest = based.build(wheel(index, "alpha"), facts.base, python=("alpha",))
    code = """
import alpha, os, subprocess, sys
print(alpha.VERSION, os.environ["OF_THE_IMAGE"], os.path.exists("/etc/debian_version"), flush=True)
subprocess.run([sys.executable, "-c", "import alpha; print(alpha.VERSION)"])
print(open("/etc/os-release").read(), end="")
for path in (alpha.__file__, "/cofferdam/template/x", "/etc/x"):
    try:
        open(path, "w")
        print("written", path)
    except OSError:
        pass
"""
    result = based.run(code, digest)
    assert result.stdout == f"1.0 yes False\n1.0\n{MARKER}", result.stderr
    assert result.metadata["image_digest"] == facts.base.image
    assert based.store.verify(digest) == ""
    shell = "python -c 'import alpha; print(alpha.VERSION)'; echo \"$(</etc/os-release)\""
    result = based.run(shell, digest, "bash")
    assert result.stdout == f"1.0\n{MARKER}", result.stderr


def test_an_image_that_was_imported_anew_is_refused_until_it_is_built_again(
    based: BasedPool, index: PackageIndex, tmp_path: Path
) -> None:
    images = ImageStore(based.store.path("0" * 64).parents[1])
    images.add("changes", machine_archive(tmp_path / "first.tar"))
    base = based.look_at("image:changes").base
    digest = based.build(wheel(index, "beta"), base, python=("beta",))
    layers = [*machine_layers(), layer(("etc/more", b"x"))]
    images.add("changes", oci_archive(tmp_path / "second.tar", *layers))
    with pytest.raises(InvalidConfiguration, match="has changed since"):
        based.run("import beta", digest)


def test_an_image_that_was_not_imported_is_refused(based: BasedPool) -> None:
    with pytest.raises(InvalidConfiguration, match="pool_images import"):
        based.look_at("image:nonesuch")


def test_packages_of_debian_need_docker(based: BasedPool, index: PackageIndex) -> None:
    base = based.look_at(IMAGE).base
    lock = add_deb(index, "hello-of-a-test", hello())
    digest = based.build(lock, base, apt=("hello-of-a-test",))
    with pytest.raises(InvalidConfiguration, match="apt packages need Docker"):
        based.run("print(1)", digest)


def test_another_interpreter_of_this_machine_has_its_own_packages(
    based: BasedPool, index: PackageIndex
) -> None:
    name = f"python{python_release()}"
    digest = based.build(wheel(index, "gamma"), Base(name), python=("gamma",))
    code = "import gamma, os, sys; print(gamma.VERSION, os.path.realpath(sys.executable))"
    assert based.run(code, digest).stdout == f"1.0 {bases.find_interpreter(name)}\n"
    assert based.store.verify(digest) == ""


def test_an_interpreter_that_is_not_here_is_refused_with_the_reason() -> None:
    for name in ("python3.99", "python3.8", "python4.1", "pypy3", "python3.11/../sh"):
        with pytest.raises(InvalidConfiguration) as refused:
            bases.find_interpreter(name)
        assert refused.value.field == "base"
