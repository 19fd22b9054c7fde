"""What is promised of a workspace's changes and of archives of single paths, wherever it is."""

from __future__ import annotations

import io
import tarfile

from providers.promises import expect
from providers.sandbox import KeptSandbox
from providers.values import Job

_BEFORE = "import os\nopen('kept', 'w').close()\nopen('gone', 'w').close()\nos.mkdir('d')"
_AFTER = (
    "open('kept', 'w').write('more')\nopen('d/new', 'w').close()\n"
    "os.symlink('kept', 'link')\nos.remove('gone')"
)


def tells_changes(sandbox: KeptSandbox) -> None:
    """What is new, changed and gone since a mark is told, and all where the mark is unknown."""
    expect("exit code", sandbox.run(Job(_BEFORE)).exit_code, 0)
    began = sandbox.files.changes()
    expect("complete without a mark", (began.complete, list(began.removed)), (True, []))
    known = {entry.path: entry.type for entry in began.entries}
    for path, kind in (("kept", "file"), ("gone", "file"), ("d", "directory")):
        expect(f"type of {path}", known.get(path), kind)
    expect("exit code", sandbox.run(Job(_AFTER)).exit_code, 0)
    for thorough in (False, True):
        since = sandbox.files.changes(began.mark, thorough=thorough)
        told = {entry.path: entry for entry in since.entries}
        sizes = [told[path].size if path in told else None for path in ("kept", "d/new")]
        expect("sizes", sizes, [4, 0])
        expect("the link", "link" in told, True)
        expect("the removed file, as an entry", "gone" in told, False)
        expect("the removed file, as removed", "gone" in since.removed, not since.complete)
    stranger = sandbox.files.changes("an unknown mark")
    expect("complete with an unknown mark", stranger.complete, True)
    found = {entry.path for entry in stranger.entries} & {"kept", "gone", "d", "d/new", "link"}
    expect("all entries", found, {"kept", "d", "d/new", "link"})


def archives_single_paths(sandbox: KeptSandbox) -> None:
    """An archive of single paths has those that are there, and nothing else."""
    # Too large to be held in memory until it is known to be whole.
    large = bytes(range(256)) * 8192
    for name, content in (("a/one", b"1"), ("a/two", b"2"), ("three", large)):
        sandbox.files.write(name, iter([content]))
    packed = b"".join(sandbox.files.read_archive("", ["a", "gone", "three", "a/one"]))
    found: dict[str, bytes | None] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            read = archive.extractfile(member)
            found[member.name] = None if read is None else read.read()
    expect("names", list(found), ["a", "three", "a/one"])
    expect("contents", (found["a"], found["three"] == large, found["a/one"]), (None, True, b"1"))
