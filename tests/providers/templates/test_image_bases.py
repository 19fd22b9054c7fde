"""Templates whose base is an image of the Docker engine, with packages of Debian in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from providers.errors import InvalidConfiguration, RateLimited
from providers.runtime.launchers import container_guest, docker_packages
from providers.templates.base import Base
from providers.templates.lock import Lock
from tests.support.package_index import PackageIndex, make_wheel, package_index
from tests.support.template_images import (
    INSTALLED,
    BasedPool,
    DockerImages,
    add_deb,
    docker_images,
    hello,
    images_of,
    make_deb,
)
from tests.support.waiting import wait_until

RUNTIMES = ("runc", "runsc")


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture(scope="module")
def images(engine: docker.DockerClient) -> Iterator[DockerImages]:
    with docker_images() as made:
        yield made


@pytest.fixture(scope="module")
def image(images: DockerImages) -> str:
    return f"image:{images.add()}"


@pytest.fixture(scope="module", params=RUNTIMES)
def based(request: pytest.FixtureRequest, image: str) -> Iterator[BasedPool]:
    data_dir = Path(tempfile.mkdtemp(dir="/var/tmp"))
    data_dir.chmod(0o755)
    try:
        pool = BasedPool("docker", data_dir, runtime=request.param)
        try:
            yield pool
        finally:
            pool.close()
    finally:
        shutil.rmtree(data_dir)


def wheel(index: PackageIndex, name: str, **parts: str) -> Lock:
    file_name = f"{name}-1.0-py3-none-any.whl"
    index.add_file(file_name, make_wheel(name, **parts))
    return Lock.parse(index.pylock(file_name))


def test_an_image_says_what_it_is(based: BasedPool, image: str) -> None:
    facts = based.look_at(image)
    assert facts.base.python.startswith("3.")
    assert facts.base.libc.startswith("glibc 2.")
    assert facts.has_apt
    assert facts.base.interpreter.startswith("/usr/bin/python3")
    assert facts.base.image.startswith("sha256:")


def test_a_template_has_the_image_and_its_packages(
    based: BasedPool, image: str, index: PackageIndex
) -> None:
    base = based.look_at(image).base
    digest = based.build(wheel(index, "alpha"), base, python=("alpha",))
    code = """
import alpha, subprocess, sys
print(open("/etc/of-a-test").read().strip(), alpha.VERSION, alpha.__file__, flush=True)
subprocess.run(["python", "-c", "import alpha; print(alpha.VERSION)"])
"""
    result = based.run(code, digest)
    assert result.stdout.split()[:2] == ["first", "1.0"], result.stderr
    assert digest in result.stdout
    assert result.stdout.splitlines()[1] == "1.0", result.stderr
    assert based.run("cat /etc/of-a-test", digest, "bash").stdout == "first\n"
    assert based.store.verify(digest) == ""


def test_packages_of_debian_are_there_and_nothing_of_how_they_came(
    based: BasedPool, image: str, index: PackageIndex
) -> None:
    base = based.look_at(image).base
    scripts = {"postinst": "id -u > /etc/made-by-a-script; chown 7:7 /etc/made-by-a-script"}
    lock = add_deb(index, "hello-of-a-test", hello(scripts=scripts))
    digest = based.build(lock, base, apt=("hello-of-a-test",))
    code = f"""
{INSTALLED}; stat -c '%u %a' /etc/made-by-a-script {INSTALLED}; cat /etc/made-by-a-script
dpkg-query -W -f '${{Status}}\\n' hello-of-a-test; ls -d /cofferdam-packages /tmp/begin 2>&1 | wc -l
find /opt/cofferdam -name '*.deb'; echo $DEBIAN_FRONTEND
"""
    result = based.run(code, digest, "bash")
    said = result.stdout.split("\n")
    assert said[:5] == ["hello", "7 644", "0 755", "0", "install ok installed"], result
    assert said[5:] == ["2", "", ""], result.stdout
    assert based.store.verify(digest) == ""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo It cannot be done >&2; exit 3", "It cannot be done"),
        ("sleep 600", "took more than"),
        ("setsid sleep 600 & exit 4", "exit status 4"),
        ("f() { f | f & }; f; wait; exit 5", "annot be installed"),
        ("cat < /dev/tcp/127.77.0.1/1 || exit 6", "annot be installed"),
        (
            "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 5)\"",
            "Error: [Errno 1",
        ),
        ("cat /dev/zero > /filled", "annot be installed"),
        ("mount -t tmpfs none /mnt", "ermi"),
        ("chroot / true", "annot be installed"),
        ("echo x > /proc/sys/kernel/core_pattern", "annot be installed"),
    ],
)
def test_a_hostile_script_makes_no_image(
    based: BasedPool,
    image: str,
    index: PackageIndex,
    script: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some do not end by themselves. The others have as long as a busy machine takes.
    endless = script.startswith(("sleep", "f()"))
    monkeypatch.setattr(docker_packages, "_INSTALL_SECONDS", 15.0 if endless else 90.0)
    # What gVisor writes to grows by a GiB.
    is_gvisor = based.pool.launcher.runtime == "gvisor"
    monkeypatch.setattr(docker_packages, "_MOST_BYTES", (2048 if is_gvisor else 64) << 20)
    base = based.look_at(image).base
    lock = add_deb(index, "evil", make_deb("evil", scripts={"postinst": script}))
    digest = based.build(lock, base, apt=("evil",))
    client = docker.from_env()
    before = images_of(client, image.removeprefix("image:"))
    with pytest.raises(InvalidConfiguration) as refused:
        based.run("print(1)", digest)
    assert refused.value.field == "template"
    assert why in refused.value.message, refused.value.message
    assert images_of(client, image.removeprefix("image:")) <= before
    labelled = {"label": f"cofferdam.pool={based.pool.choice.pool_id}"}
    assert not [
        each for each in client.containers.list(all=True, filters=labelled)
        if "cofferdam-packages" in str(each.attrs["Config"])
    ]  # fmt: skip
    client.close()
    based.store.remove(digest)


def test_an_image_that_has_changed_is_refused_until_it_is_built_again(
    based: BasedPool, index: PackageIndex, images: DockerImages
) -> None:
    name = images.add()
    base = based.look_at(f"image:{name}").base
    digest = based.build(wheel(index, "beta"), base, python=("beta",))
    images.change(name, {"etc/of-a-test": "second\n"})
    with pytest.raises(InvalidConfiguration, match="has changed since"):
        based.run("import beta", digest)
    base = based.look_at(f"image:{name}").base
    again = based.build(wheel(index, "beta"), base, python=("beta",))
    assert again != digest
    assert based.run("print(open('/etc/of-a-test').read())", again).stdout == "second\n\n"


def test_a_script_leaves_no_device_and_no_process(
    based: BasedPool, image: str, index: PackageIndex
) -> None:
    base = based.look_at(image).base
    script = "mknod /disk b 8 0 || true; ln -s /proc/1/root /way-out; setsid sleep 600 &"
    lock = add_deb(index, "device", make_deb("device", scripts={"postinst": script}))
    digest = based.build(lock, base, apt=("device",))
    code = "ls -d /disk /tmp/begin; ls -l /way-out; ps -e -o args= 2>/dev/null | grep '[s]leep 600'"
    result = based.run(code, digest, "bash")
    assert "/way-out -> /proc/1/root" in result.stdout
    assert len(result.stdout.splitlines()) == 1, result.stdout


def test_a_caller_does_not_wait_for_packages_that_take_long(
    based: BasedPool, image: str, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = based.look_at(image).base
    slow = {"postinst": "sleep 2; date +%N > /made-at"}
    digest = based.build(
        add_deb(index, "slow", make_deb("slow", scripts=slow)), base, apt=("slow",)
    )
    monkeypatch.setattr(container_guest, "MAKING_SECONDS", 0.05)
    with pytest.raises(RateLimited) as busy:
        based.run("print(1)", digest)
    assert (busy.value.field, busy.value.retry_after) == ("template", 0.025)
    read = "print(open('/made-at').read())"

    def made() -> str:
        try:
            return based.run(read, digest).stdout
        except RateLimited:
            return ""

    wait_until(lambda: made() != "", seconds=60)
    # It was made once.
    assert made() == made() != ""


def test_an_image_that_the_engine_has_not_is_not_pulled(based: BasedPool) -> None:
    digest = based.build(base=Base("image:cofferdam-tests/no-such-image:1"))
    with pytest.raises(InvalidConfiguration, match="pulls none"):
        based.run("print(1)", digest)
