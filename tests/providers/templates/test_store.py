"""The store of templates: what it builds, and what it refuses to build."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from providers.templates.declaration import Declaration
from providers.templates.files import BuildFailed
from providers.templates.lock import Lock, LockedPackage
from providers.templates.store import Built, TemplateStore, python_release
from tests.support.package_index import PackageIndex, make_tarball, make_wheel, package_index

WANTED = Declaration(python=("alpha",))


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(tmp_path / "data", most_bytes=1 << 20)


def fetch(url: str, most_bytes: int) -> Iterator[bytes]:
    with httpx.stream("GET", url) as response:
        response.raise_for_status()
        yield from response.iter_bytes()


def build(
    store: TemplateStore, lock: Lock, log: list[str] | None = None, wanted: Declaration = WANTED
) -> Built:
    return store.build(wanted, lock, fetch, (log if log is not None else []).append)


def locked(index: PackageIndex, *names: str) -> Lock:
    return Lock.parse(index.pylock(*names))


def alpha(index: PackageIndex, content: bytes, version: str = "1.0") -> Lock:
    name = f"alpha-{version}-py3-none-any.whl"
    index.add_file(name, content)
    return locked(index, name)


def left_behind(store: TemplateStore) -> list[str]:
    """Return all files that are not locks of the store's own."""
    root = store.path("0" * 64).parent
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    ]


def test_a_template_imports_what_was_locked(store: TemplateStore, index: PackageIndex) -> None:
    index.add("alpha", requires=("beta",))
    index.add("beta", "2.0", files={"beta/__init__.py": "ANSWER = 42\n", "beta/data.txt": "x"})
    built = build(store, locked(index, *index.files))
    python = store.path(built.digest) / "bin" / "python"
    code = "import alpha, beta; print(alpha.VERSION, beta.ANSWER, beta.__cached__)"
    said = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True)
    assert said.stdout.split()[:2] == ["1.0", "42"], said.stderr
    assert Path(said.stdout.split()[2]).is_file(), "it was compiled when it was built"
    assert built.licences == {"alpha": "MIT", "beta": "MIT"}
    assert store.verify(built.digest) == ""
    assert store.digests() == [built.digest]


def test_its_scripts_start_with_the_python_of_the_sandbox(
    store: TemplateStore, index: PackageIndex
) -> None:
    lock = alpha(
        index,
        make_wheel(
            "alpha",
            files={
                "alpha.py": "def main():\n    print('of the module')\n",
                "alpha-1.0.dist-info/entry_points.txt": "[console_scripts]\nalpha = alpha:main\n"
                "python = alpha:main\n../evil = alpha:main\nodd = os;evil\n",
                "alpha-1.0.data/scripts/old": "#!python\nprint('of the script')\n",
                "alpha-1.0.data/scripts/python3": "#!python\n",
            },
        ),
    )
    folder = store.path(build(store, lock).digest)
    programs = {path.name for path in (folder / "bin").iterdir() if not path.is_symlink()}
    assert programs == {"alpha", "old"}
    for name in programs:
        said = subprocess.run(
            [folder / "bin" / name],
            capture_output=True,
            text=True,
            env={"PATH": f"{folder}/bin:/usr/bin:/bin"},
        )
        assert said.stdout.startswith("of the "), said.stderr


def test_the_same_lock_is_built_once_and_asks_no_index(
    store: TemplateStore, index: PackageIndex
) -> None:
    index.add("alpha")
    lock = locked(index, *index.files)
    first = build(store, lock)
    index.requests.clear()
    log: list[str] = []
    assert build(store, lock, log) == first == store.find(WANTED, lock)
    assert index.requests == []
    assert log == [f"Nothing to do: {first.digest[:12]} has the same packages"]


def test_packages_of_many_templates_are_fetched_and_stored_once(
    store: TemplateStore, index: PackageIndex
) -> None:
    index.add("alpha")
    index.add("beta")
    both = build(store, locked(index, *index.files))
    index.requests.clear()
    one = build(store, locked(index, "alpha-1.0-py3-none-any.whl"))
    assert one.digest != both.digest
    assert index.requests == []
    place = f"lib/python{python_release()}/site-packages/alpha.py"
    files = [store.path(each.digest) / place for each in (one, both)]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    store.remove(both.digest)
    assert store.verify(one.digest) == ""
    store.remove(one.digest)
    assert [each for each in left_behind(store) if not each.startswith("keys/")] == []
    assert store.find(WANTED, locked(index, "alpha-1.0-py3-none-any.whl")) is None


def test_the_digest_is_that_of_all_files(store: TemplateStore, index: PackageIndex) -> None:
    index.add("alpha")
    built = build(store, locked(index, *index.files))
    folder = store.path(built.digest)
    site = folder / "lib" / f"python{python_release()}" / "site-packages"
    changes = (
        lambda: (folder / "bin" / "python").unlink(),
        lambda: (site / "alpha.py").write_text("VERSION = 'other'\n"),
        lambda: next((site / "__pycache__").iterdir()).write_bytes(b"other"),
        lambda: (site / "more.pth").write_text("import evil\n"),
        lambda: (site / "link").symlink_to("/etc"),
    )
    for change in changes:
        change()
        assert store.verify(built.digest) != ""


def test_a_file_with_another_hash_is_refused_and_nothing_is_left(
    store: TemplateStore, index: PackageIndex
) -> None:
    index.add("alpha")
    index.add("beta")
    lock = locked(index, *index.files)
    index.files["beta-1.0-py3-none-any.whl"] = make_wheel("beta", files={"beta.py": "evil = 1\n"})
    with pytest.raises(BuildFailed, match="has another hash than its lock"):
        build(store, lock)
    assert left_behind(store) == []


def test_a_file_larger_than_its_lock_says_is_not_read_on(
    store: TemplateStore, index: PackageIndex
) -> None:
    index.add("alpha")
    lock = locked(index, *index.files)
    index.files["alpha-1.0-py3-none-any.whl"] += bytes(1 << 20)
    with pytest.raises(BuildFailed, match="alpha: The file is larger than its lock says"):
        build(store, lock)


@pytest.mark.parametrize(
    "name",
    ["../evil.py", "/etc/evil", "a/../../evil.py", "a//b.py", "alpha-1.0.data/purelib/../../x"],
)
def test_a_path_that_leads_outside_is_refused(
    store: TemplateStore, index: PackageIndex, name: str
) -> None:
    lock = alpha(index, make_wheel("alpha", files={name: "evil"}))
    with pytest.raises(BuildFailed, match="not a relative path"):
        build(store, lock)
    assert left_behind(store) == []


def test_a_link_in_a_wheel_is_refused(store: TemplateStore, index: PackageIndex) -> None:
    buffer = io.BytesIO(make_wheel("alpha"))
    with zipfile.ZipFile(buffer, "a") as archive:
        entry = zipfile.ZipInfo("alpha/link.py")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(BuildFailed, match="is no plain file"):
        build(store, alpha(index, buffer.getvalue()))


def test_what_would_run_at_every_start_of_python_is_left_out(
    store: TemplateStore, index: PackageIndex
) -> None:
    files = {
        "alpha.py": "",
        "evil.pth": "import os; os._exit(7)\n",
        "EVIL.PTH": "import os; os._exit(7)\n",
        "sitecustomize.py": "import os; os._exit(7)\n",
        "usercustomize/__init__.py": "import os; os._exit(7)\n",
        "alpha-1.0.data/platlib/sitecustomize.py": "import os; os._exit(7)\n",
        "__pycache__/alpha.cpython-311.pyc": "evil",
    }
    log: list[str] = []
    built = build(store, alpha(index, make_wheel("alpha", files=files)), log)
    done = subprocess.run([str(store.path(built.digest) / "bin/python"), "-c", "print('started')"])
    assert done.returncode == 0
    assert sum("it would run at every start" in line for line in log) == 5


def test_a_template_has_a_bound_for_its_bytes(store: TemplateStore, index: PackageIndex) -> None:
    small = alpha(index, make_wheel("alpha", files={"alpha/zeros.bin": bytes(2 << 20)}))
    large = alpha(index, make_wheel("alpha", "2.0", files={}) + bytes(2 << 20), "2.0")
    for lock in (small, large):
        with pytest.raises(BuildFailed, match="takes more room than templates may"):
            build(store, lock)
        assert left_behind(store) == []


def test_a_wheel_of_another_name_or_version_is_refused(
    store: TemplateStore, index: PackageIndex
) -> None:
    url = index.add("alpha")
    digest = index.hashes["alpha-1.0-py3-none-any.whl"]
    for name, version in (("beta", "1.0"), ("alpha", "2.0")):
        lock = Lock((LockedPackage("python", name, version, url, "sha256", digest),))
        with pytest.raises(BuildFailed, match="is of another package or version"):
            build(store, lock)


def test_a_wheel_for_another_machine_is_refused(store: TemplateStore, index: PackageIndex) -> None:
    index.add_file("alpha-1.0-cp311-cp311-win_amd64.whl", make_wheel("alpha"))
    with pytest.raises(BuildFailed, match="is not for Python"):
        build(store, locked(index, *index.files))


def test_what_is_no_archive_is_refused(store: TemplateStore, index: PackageIndex) -> None:
    with pytest.raises(BuildFailed, match="alpha: The file is damaged"):
        build(store, alpha(index, b"PK\x03\x04 not a zip"))


def test_what_the_log_raises_ends_the_build(store: TemplateStore, index: PackageIndex) -> None:
    index.add("alpha")

    class Cancelled(Exception):
        pass

    def tell(line: str) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        store.build(WANTED, locked(index, *index.files), fetch, tell)
    assert left_behind(store) == []


def npm_lock(index: PackageIndex, **places: str) -> Lock:
    packages = {}
    for place, name in places.items():
        ((version, found),) = index.npm[name]["versions"].items()
        packages[f"node_modules/{place}"] = {
            "version": version,
            "resolved": found["dist"]["tarball"],
            "integrity": found["dist"]["integrity"],
        }
    return Lock.parse(npm=json.dumps({"lockfileVersion": 3, "packages": {"": {}, **packages}}))


def test_npm_packages_are_found_by_node_and_their_programs_by_name(
    store: TemplateStore, index: PackageIndex
) -> None:
    described = {"name": "gamma", "version": "1.0.0", "bin": "cli.js", "license": "ISC"}
    files = {
        "package.json": json.dumps(described),
        "index.js": "module.exports = 42;\n",
        "cli.js": "console.log('cli', require('./index.js'));\n",
    }
    index.add_npm("gamma", "1.0.0", files)
    built = build(store, npm_lock(index, gamma="gamma"), wanted=Declaration(npm=("gamma",)))
    folder = store.path(built.digest)
    said = subprocess.run([folder / "bin" / "gamma"], capture_output=True, text=True)
    assert said.stdout == "cli 42\n", said.stderr
    assert built.licences == {"gamma": "ISC"}
    assert store.verify(built.digest) == ""


def test_a_link_or_a_path_outside_in_a_tarball_is_refused(
    store: TemplateStore, index: PackageIndex
) -> None:
    for number, name in enumerate(("../../evil.js", "link")):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            entry = tarfile.TarInfo(f"package/{name}")
            if name == "link":
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry, io.BytesIO())
        index.add_npm(f"evil{number}", "1.0.0", {})
        ((_, found),) = index.npm[f"evil{number}"]["versions"].items()
        file_name = found["dist"]["tarball"].rpartition("/")[2]
        index.add_file(file_name, buffer.getvalue())
        lock = Lock(
            (
                LockedPackage(
                    "npm", f"evil{number}", "1.0.0", found["dist"]["tarball"], "sha256",
                    index.hashes[file_name], None, f"node_modules/evil{number}",
                ),
            )
        )  # fmt: skip
        with pytest.raises(BuildFailed):
            build(store, lock)
        assert left_behind(store) == []


def test_what_a_killed_build_left_is_removed_by_the_next(
    store: TemplateStore, index: PackageIndex
) -> None:
    draft = store.path("0" * 64).parent / "drafts" / "former"
    draft.mkdir(parents=True)
    (draft / "half").write_text("x")
    index.add("alpha")
    build(store, locked(index, *index.files))
    assert not draft.exists()


def test_a_tarball_that_is_none_is_refused(store: TemplateStore, index: PackageIndex) -> None:
    url = index.add_file("gamma-1.0.0.tgz", make_tarball({"a.js": ""})[:40])
    lock = Lock(
        (
            LockedPackage(
                "npm", "gamma", "1.0.0", url, "sha256", index.hashes["gamma-1.0.0.tgz"], None,
                "node_modules/gamma",
            ),
        )
    )  # fmt: skip
    with pytest.raises(BuildFailed, match="gamma: The file is damaged"):
        build(store, lock)
