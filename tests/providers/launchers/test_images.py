"""The store of images: what an archive holds is unpacked once, and nothing beside it is touched."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.launchers import image_archive, images
from providers.runtime.launchers.images import ImageStore
from providers.runtime.service.command import _first_settings
from sandbox_site.private_files import tighten
from tests.support.images import (
    config_of,
    digest_of,
    docker_files,
    entry,
    hard_link,
    layer,
    link,
    oci_archive,
    oci_files,
    write_archive,
)
from tests.support.processes import ROOT


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "data")


def bring(store: ImageStore, tmp_path: Path, *layers: bytes, name: str = "test") -> Path:
    """Import these layers; the root file system that they became."""
    store.add(name, oci_archive(tmp_path / "image.tar", *layers))
    return store.find(name).root


def refused(store: ImageStore, tmp_path: Path, *layers: bytes) -> str:
    """Import these layers in vain: nothing of them is left, and the reason."""
    with pytest.raises(InvalidConfiguration) as caught:
        bring(store, tmp_path, *layers)
    assert left(tmp_path) == []
    assert store.list() == []
    return caught.value.message


def left(tmp_path: Path) -> list[str]:
    """The names of folders in the store."""
    return sorted(path.name for path in (tmp_path / "data" / "images").iterdir() if path.is_dir())


def test_layers_lie_over_one_another_in_their_order(store: ImageStore, tmp_path: Path) -> None:
    root = bring(
        store,
        tmp_path,
        layer(
            entry("usr", tarfile.DIRTYPE),
            ("usr/both", b"lower"),
            ("usr/gone", b"lower"),
            ("usr/becomes-a-folder", b"lower"),
            ("opaque/old", b"lower"),
            ("tree/of/old", b"lower"),
            link("bin", "usr/bin"),
            ("usr/bin/tool", b"tool"),
        ),
        layer(
            ("usr/both", b"upper"),
            ("usr/.wh.gone", b""),
            entry("usr/becomes-a-folder", tarfile.DIRTYPE),
            ("usr/becomes-a-folder/file", b"upper"),
            # The mark need not be the first of its folder.
            ("opaque/new", b"upper"),
            ("opaque/.wh..wh..opq", b""),
            (".wh.tree", b""),
            ("tree/new", b"upper"),
            # Through a link of a lower layer, as some tools have it.
            ("bin/other", b"upper"),
            (".wh..wh.plnk", b""),
        ),
    )
    assert (root / "usr/both").read_bytes() == b"upper"
    assert not (root / "usr/gone").exists()
    assert (root / "usr/becomes-a-folder/file").read_bytes() == b"upper"
    assert os.listdir(root / "opaque") == ["new"]
    assert os.listdir(root / "tree") == ["new"]
    assert sorted(os.listdir(root / "usr/bin")) == ["other", "tool"]
    assert not list(root.rglob(".wh.*"))


def test_an_archive_of_docker_save_is_read_too(store: ImageStore, tmp_path: Path) -> None:
    files = docker_files([layer(("a", b"1")), layer(("b", b"2"))])
    store.add("saved", write_archive(tmp_path / "saved.tar", files))
    root = store.find("saved").root
    assert [(root / name).read_bytes() for name in "ab"] == [b"1", b"2"]
    # Since version 25 it writes both descriptions, over the blobs of the layout.
    both = oci_files([layer(("a", b"3"))])
    index = json.loads(both["index.json"])
    manifest = json.loads(both["blobs/sha256/" + index["manifests"][0]["digest"][7:]])
    entries = [manifest["config"], *manifest["layers"]]
    config, *layers = ["blobs/sha256/" + each["digest"][7:] for each in entries]
    both["manifest.json"] = json.dumps([{"Config": config, "Layers": layers}]).encode()
    store.add("both", write_archive(tmp_path / "both.tar", both))
    assert (store.find("both").root / "a").read_bytes() == b"3"


def test_the_same_image_again_is_there_at_once(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer(("a", b"1"))]
    first = bring(store, tmp_path, *layers)
    monkeypatch.setattr(images, "unpack", lambda *_: pytest.fail("it was unpacked again"))
    store.add("other", write_archive(tmp_path / "saved.tar", docker_files(layers)))
    assert store.find("other").root == first
    assert [each.name for each in store.list()] == ["other", "test"]
    store.remove("test")
    assert store.find("other").root == first
    store.remove("other")
    assert not first.exists()
    assert left(tmp_path) == []


def test_what_a_pool_has_in_use_stays_until_it_has_not(store: ImageStore, tmp_path: Path) -> None:
    root = bring(store, tmp_path, layer(("a", b"1")))
    held = store.find("test").hold()
    store.remove("test")
    assert (root / "a").exists()
    with pytest.raises(ProviderUnavailable, match=r"pool_images import test"):
        store.find("test")
    os.close(held)
    bring(store, tmp_path, layer(("a", b"2")), name="another")
    assert not root.exists()


def test_an_image_that_is_named_anew_takes_the_place_of_the_former(
    store: ImageStore, tmp_path: Path
) -> None:
    former = bring(store, tmp_path, layer(("a", b"1")))
    image = store.find("test")
    root = bring(store, tmp_path, layer(("a", b"2")))
    assert (root / "a").read_bytes() == b"2"
    assert not former.exists()
    with pytest.raises(ProviderUnavailable, match="import"):
        image.hold()


def test_sandboxes_users_can_read_everything_and_gain_nothing(
    store: ImageStore, tmp_path: Path
) -> None:
    former = os.umask(0o077)
    try:
        root = bring(
            store,
            tmp_path,
            layer(
                entry("private", tarfile.DIRTYPE, mode=0o700),
                (entry("private/secret", mode=0), b"x"),
                (entry("usr/bin/su", mode=0o6755), b"x"),
                (entry("usr/bin/root-only", mode=0o100), b"x"),
                entry("sticky", tarfile.DIRTYPE, mode=0o7777),
            ),
        )
    finally:
        os.umask(former)
    # What the service takes from everybody else at its start.
    tighten(tmp_path / "data")
    assert stat.S_IMODE((tmp_path / "data/images").stat().st_mode) == 0o700
    modes = {
        str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode)
        for path in root.rglob("*")
        if not path.is_symlink()
    }
    open_to_all = {"tmp", "workspace"}
    assert {modes.pop(name) for name in open_to_all} == {0o1777}
    assert modes["private/secret"] == 0o644
    assert modes["usr/bin/su"] == modes["usr/bin/root-only"] == 0o755
    assert {mode for name, mode in modes.items() if (root / name).is_dir()} == {0o755}
    assert root.stat().st_mode & 0o777 == 0o755


def test_what_is_mounted_over_is_a_folder_or_file_of_the_root(
    store: ImageStore, tmp_path: Path
) -> None:
    root = bring(
        store,
        tmp_path,
        layer(
            link("workspace", "/etc"),
            link("tmp", "../../outside"),
            ("proc", b"a file"),
            link("etc/passwd", "/etc/shadow"),
            link("cofferdam", "/usr"),
            ("etc/shadow", b"kept"),
            link("dev", "/"),
        ),
    )
    for name in ("workspace", "tmp", "proc", "dev", "cofferdam", "run"):
        assert stat.S_ISDIR((root / name).lstat().st_mode), name
    for name in ("passwd", "group", "hosts"):
        assert stat.S_ISREG((root / "etc" / name).lstat().st_mode)
    assert os.readlink(root / "home/user") == "/workspace"
    own = bring(store, tmp_path, layer(("home/user/app.py", b"x")))
    assert (own / "home/user/app.py").exists()


TRAVERSALS = {
    "parent": ("../outside", b"x"),
    "parent in the middle": ("a/../../outside", b"x"),
    "whiteout of a parent": ("../.wh.outside", b""),
    "whiteout named parent": ("a/.wh...", b""),
    "whiteout of itself": ("a/.wh..", b""),
    "whiteout of nothing": ("a/.wh.", b""),
    "opaque parent": ("../.wh..wh..opq", b""),
    "hard link out": hard_link("inside", "../outside"),
    "hard link to nothing": hard_link("inside", "/no/such/file"),
    "hard link to a folder": hard_link("inside", "a"),
    "a nul": (entry("usr/x", pax_headers={"path": "a\0b"}), b"x"),
    "too deep": ("a/" * 300 + "x", b"x"),
}


@pytest.mark.parametrize("member", TRAVERSALS.values(), ids=TRAVERSALS)
def test_a_path_that_leaves_the_root_is_refused(
    store: ImageStore, tmp_path: Path, member: Any
) -> None:
    (tmp_path / "data" / "images").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "data", tmp_path / "data" / "images"):
        (folder / "outside").write_text("outside")
    refused(store, tmp_path, layer(entry("a", tarfile.DIRTYPE), member))
    for folder in (tmp_path, tmp_path / "data", tmp_path / "data" / "images"):
        assert (folder / "outside").read_text() == "outside"
        assert (folder / "outside").stat().st_nlink == 1


@pytest.mark.parametrize("up", ["../../../../../../..", ""])
def test_links_lead_nowhere_but_into_the_root(store: ImageStore, tmp_path: Path, up: str) -> None:
    """As from inside: the root is its own parent, and what is absolute begins there."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("outside")
    root = bring(
        store,
        tmp_path,
        layer(link("way", f"{up}{target}"), link("file", f"{up}{target}/kept")),
        layer(
            ("way/kept", b"inside"),
            ("way/.wh.gone", b""),
            ("file", b"a file of its own"),
            hard_link("also", "way/kept"),
        ),
        layer(("way/.wh.kept", b""), ("way/.wh..wh..opq", b""), ("way/new", b"inside")),
    )
    assert os.listdir(target) == ["kept"]
    assert (target / "kept").read_text() == "outside"
    assert (target / "kept").stat().st_nlink == 1
    inside = root / str(target).lstrip("/")
    assert os.listdir(inside) == ["new"]
    assert (root / "file").read_bytes() == b"a file of its own"
    assert (root / "also").read_bytes() == b"inside"


def test_a_name_that_begins_at_the_root_begins_at_the_images_own(
    store: ImageStore, tmp_path: Path
) -> None:
    assert (bring(store, tmp_path, layer(("/a/b", b"x"), ("./c", b"y"))) / "a/b").exists()


def test_links_that_lead_in_a_circle_are_refused(store: ImageStore, tmp_path: Path) -> None:
    circle = layer(link("a", "b"), link("b", "a"), ("a/x", b""))
    assert "links" in refused(store, tmp_path, circle)


def test_depth_cannot_be_had_by_links_either(store: ImageStore, tmp_path: Path) -> None:
    deep = "d/" * 150
    chain = layer((f"{deep}x", b""), link("l", deep), (f"l/{deep}x", b""))
    assert "deep" in refused(store, tmp_path, chain)


def test_devices_pipes_and_what_nobody_knows_are_left_out(
    store: ImageStore, tmp_path: Path
) -> None:
    root = bring(
        store,
        tmp_path,
        layer(
            entry("disk", tarfile.BLKTYPE, devmajor=8, devminor=0),
            entry("kmem", tarfile.CHRTYPE, devmajor=1, devminor=2),
            entry("pipe", tarfile.FIFOTYPE),
            entry("strange", b"Z"),
            ("file", b"x"),
        ),
    )
    names = set(os.listdir(root))
    assert "file" in names
    assert not names & {"disk", "kmem", "pipe", "strange"}


def test_a_bomb_is_refused_before_it_fills_the_disk(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_archive, "MOST_BYTES", 4 << 20)
    monkeypatch.setattr(image_archive, "MOST_ENTRIES", 50)
    large = layer(("zeros", bytes(8 << 20)))
    assert "4 MiB" in refused(store, tmp_path, large)
    # All layers together.
    half = [layer((name, bytes(3 << 20))) for name in "ab"]
    assert "4 MiB" in refused(store, tmp_path, *half)
    many = layer(*((f"f{number}", b"") for number in range(60)))
    assert "entries" in refused(store, tmp_path, many)
    # Folders that no entry names count too.
    deep = layer(*((f"{number}/a/b/c/d/e/f/g/h", b"") for number in range(10)))
    assert "entries" in refused(store, tmp_path, deep)


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE]
)
def test_headers_that_are_a_bomb_are_not_read_into_memory(
    store: ImageStore, tmp_path: Path, kind: bytes
) -> None:
    large = entry("header", kind)
    large.size = 64 << 20
    bomb = large.tobuf(tarfile.USTAR_FORMAT) + bytes(64 << 20) + layer(("x", b""))
    refused(store, tmp_path, bomb)


def test_a_size_that_leads_backwards_is_refused(store: ImageStore, tmp_path: Path) -> None:
    """tarfile itself would read the same entry for ever."""
    backwards = entry("x")
    backwards.size = -1024
    header = bytearray(backwards.tobuf(tarfile.GNU_FORMAT))
    refused(store, tmp_path, layer(("a", b"1"))[:1024] + bytes(header) + bytes(1024))


def test_an_archive_of_too_many_files_or_layers_is_refused(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_archive, "MOST_LAYERS", 2)
    assert "layers" in refused(store, tmp_path, *[layer(("a", b"%d" % n)) for n in range(3)])
    monkeypatch.setattr(image_archive, "MOST_MEMBERS", 3)
    assert "files" in refused(store, tmp_path, layer(("a", b"1")))


def _first_layer(files: dict[str, bytes]) -> str:
    return next(name for name, content in files.items() if content[:2] == b"\x1f\x8b")


def _other_config(files: dict[str, bytes]) -> None:
    name = next(name for name, content in files.items() if b"diff_ids" in content)
    files[name] = files[name].replace(b"PATH=", b"PATH=/evil:")


def _other_layer(files: dict[str, bytes]) -> None:
    files[_first_layer(files)] = gzip.compress(layer(("a", b"2")))


def _other_manifest(files: dict[str, bytes]) -> None:
    name = next(name for name, content in files.items() if b'"layers"' in content and "/" in name)
    files[name] += b" "


def _other_compression(files: dict[str, bytes]) -> None:
    """Its content would be the one that the configuration names."""
    name = _first_layer(files)
    files[name] = gzip.compress(gzip.decompress(files[name]), 9)


@pytest.mark.parametrize(
    "change", [_other_config, _other_layer, _other_manifest, _other_compression]
)
def test_a_blob_that_is_not_what_its_digest_says_is_refused(
    store: ImageStore, tmp_path: Path, change: Callable[[dict[str, bytes]], None]
) -> None:
    files = oci_files([layer(("a", b"1"))])
    change(files)
    with pytest.raises(InvalidConfiguration, match="sha256"):
        store.add("test", write_archive(tmp_path / "changed.tar", files))
    assert left(tmp_path) == []


def test_the_layers_of_docker_save_are_those_of_its_configuration(
    store: ImageStore, tmp_path: Path
) -> None:
    """Their names are no digests there; the configuration has those of the contents."""
    for name in ("0/layer.tar", "config"):
        files = docker_files([layer(("a", b"1"))])
        if name == "config":
            name = next(each for each in files if digest_of(files[each]) in each)
            files[name] = files[name].replace(b"PATH=", b"PATH=/evil:")
        else:
            files[name] = layer(("a", b"2"))
        with pytest.raises(InvalidConfiguration, match="sha256"):
            store.add("test", write_archive(tmp_path / "changed.tar", files))
    files = docker_files([layer(("a", b"1"))], config_of([]))
    with pytest.raises(InvalidConfiguration):
        store.add("test", write_archive(tmp_path / "changed.tar", files))


def _no_image(files: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda path: write_archive(path, files)


def _text(path: Path) -> Path:
    path.write_text("no archive")
    return path


def _cut(path: Path) -> Path:
    content = oci_archive(path, layer(("a", os.urandom(4096)))).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def _of_another_machine(path: Path) -> Path:
    layers = [layer(("a", b"1"))]
    return oci_archive(path, *layers, config={**config_of(layers), "architecture": "s390x"})


def _zstd(path: Path) -> Path:
    return write_archive(path, docker_files([b"\x28\xb5\x2f\xfd" + bytes(600)]))


def _link_to_itself(path: Path) -> Path:
    files = docker_files([layer(("a", b"1"))])
    del files["0/layer.tar"]
    write_archive(path, files)
    with tarfile.open(path, "a") as tar:
        tar.addfile(link("0/layer.tar", "layer.tar"))
    return path


@pytest.mark.parametrize(
    "write",
    [
        _text,
        _cut,
        _of_another_machine,
        _zstd,
        _link_to_itself,
        lambda path: path,
        lambda path: path.parent,
        _no_image({"a": b"x"}),
        _no_image({"manifest.json": b"{"}),
        _no_image({"manifest.json": b"[]"}),
        _no_image({"manifest.json": b"[7]"}),
        _no_image({"manifest.json": b"[" * 100_000}),
        _no_image({"manifest.json": b'[{"Config": "a", "Layers": []}]'}),
        _no_image({"manifest.json": b'[{"Config": {}, "Layers": 3}]'}),
        _no_image({"index.json": b'{"manifests": {}}'}),
        _no_image({"index.json": b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}'}),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(
    store: ImageStore, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    with pytest.raises(InvalidConfiguration):
        store.add("test", write(tmp_path / "archive"))
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["", "../x", "a b", "-x", "a\n", "x" * 400])
def test_a_name_is_one_that_settings_can_have(store: ImageStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfiguration, match="name of an image"):
        bring(store, tmp_path, layer(("a", b"1")), name=name)


def test_a_name_that_is_not_there_is_told_with_the_remedy(store: ImageStore) -> None:
    with pytest.raises(ProviderUnavailable, match=r"manage\.py pool_images import nothing"):
        store.find("nothing")
    with pytest.raises(InvalidConfiguration):
        store.remove("nothing")
    assert store.list() == []


def test_interpreters_are_found_as_from_inside(store: ImageStore, tmp_path: Path) -> None:
    layers = [
        layer(
            link("opt/venv/bin/python3", "/usr/local/bin/python3"),
            link("usr/local/bin/python3", "python3.12"),
            (entry("usr/local/bin/python3.12", mode=0o755), b"x"),
            ("usr/local/bin/node", b"not executable"),
            (entry("usr/bin/node", mode=0o755), b"x"),
            link("usr/bin/bash", "/../../../bin/sh"),
        )
    ]
    path = "/opt/venv/bin:relative::/usr/local/bin:/usr/bin"
    how = config_of(layers, Env=[f"PATH={path}", "NODE_PATH=/modules", "broken"])
    store.add("test", oci_archive(tmp_path / "image.tar", *layers, config=how))
    image = store.find("test")
    assert image.interpreter("python") == "/opt/venv/bin/python3"
    assert image.version("python") == "python 3.12"
    assert image.interpreter("nodejs") == "/usr/bin/node"
    # A link to the machine's own shell leads nowhere in there.
    assert image.interpreter("bash") is None
    assert image.environment == {"PATH": path, "NODE_PATH": "/modules"}


@pytest.mark.parametrize("name", ["python3.8", "python2.7", "pypy3.10", "python3"])
def test_a_python_that_the_guest_may_not_run_with_is_none(
    store: ImageStore, tmp_path: Path, name: str
) -> None:
    members = [(entry(f"usr/bin/{name}", mode=0o755), b"x")]
    links = [] if name == "python3" else [link("usr/bin/python3", name)]
    bring(store, tmp_path, layer(*members, *links))
    assert store.find("test").interpreter("python") is None


def test_the_version_of_a_python_is_that_of_its_library_otherwise(
    store: ImageStore, tmp_path: Path
) -> None:
    python = (entry("usr/bin/python3", mode=0o755), b"x")
    root = bring(store, tmp_path, layer(python, ("usr/lib/python3.13/os.py", b"")))
    assert store.find("test").version("python") == "python 3.13"
    bring(store, tmp_path, layer(python, link("usr/lib", f"{root}/usr/lib")))
    assert store.find("test").interpreter("python") is None


KILLED = """
import sys
from pathlib import Path
from providers.runtime.launchers.images import ImageStore
from providers.runtime.service.command import _first_settings
ImageStore(Path(sys.argv[1])).add("test", Path(sys.argv[2]))
"""


def test_an_import_that_was_killed_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    archive = oci_archive(
        tmp_path / "image.tar", *[layer((f"{n}", bytes(64 << 20))) for n in range(4)]
    )
    command = [sys.executable, "-c", KILLED, str(tmp_path / "data"), str(archive)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "data").glob("images/staging-*/rootfs/0")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert store.list() == []
    assert [name[:8] for name in left(tmp_path)] == ["staging-"]
    bring(store, tmp_path, layer(("a", b"1")))
    assert [name[:7] for name in left(tmp_path)] == ["sha256-"]


def test_two_imports_at_a_time_follow_one_another(store: ImageStore, tmp_path: Path) -> None:
    archives = [oci_archive(tmp_path / f"{n}.tar", layer(("a", bytes([n]) * 9))) for n in range(3)]
    commands = [
        [
            sys.executable,
            "-c",
            KILLED.replace('"test"', f'"n{n}"'),
            str(tmp_path / "data"),
            str(path),
        ]
        for n, path in enumerate(archives)
    ]
    running = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert [each.name for each in store.list()] == ["n0", "n1", "n2"]


def test_the_command_imports_lists_and_removes(tmp_path: Path) -> None:
    archive = oci_archive(tmp_path / "image.tar", layer(("a", b"1")))

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", "pool_images", *arguments],
            cwd=ROOT,
            env={**os.environ, "DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
            check=False,
        )

    assert "science" in ask("import", "science", str(archive)).stdout
    assert "science" in ask("list").stdout
    (root,) = (tmp_path / "data").glob("images/sha256-*/rootfs")
    assert root.stat().st_mode & 0o777 == 0o755
    assert ask("remove", "science").returncode == 0
    assert ask("list").stdout == ""
    failed = ask("remove", "science")
    assert failed.returncode != 0
    assert "science" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_names_of_an_engines_images_are_ignored_where_there_is_none(
    settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RAGFlow's settings name some. One that was imported is used."""
    settings.DATA_DIR = tmp_path
    settings.POOL_IMAGES = {"python": "infiniflow/sandbox-base-python:latest", "nodejs": ""}
    assert _first_settings(settings, "gvisor").images == {}
    assert "infiniflow/sandbox-base-python" in caplog.text
    named = {"python": "infiniflow/sandbox-base-python:latest"}
    assert _first_settings(settings, "docker").images == named
    archive = oci_archive(tmp_path / "image.tar", layer(("etc/os-release", b"ours")))
    ImageStore(tmp_path).add(named["python"], archive)
    assert _first_settings(settings, "gvisor").images == named
