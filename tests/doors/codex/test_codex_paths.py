"""The paths of Codex are file: URIs, and lead to one place of the sandbox each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executions.doors.codex.messages import Failure, Paths

NAMES = st.binary(min_size=1, max_size=20).filter(
    lambda name: not {b"/"[0], 0} & set(name) and name not in (b".", b"..")
)


@given(st.lists(NAMES, min_size=1, max_size=5), st.sampled_from(["/workspace", "/home/ann/é x"]))
def test_a_path_comes_back_from_its_uri(names: list[bytes], folder: str) -> None:
    paths = Paths(folder)
    below = b"/".join(names).decode("utf-8", "surrogateescape")
    for path in (f"/workspace/{below}", f"/tmp/{below}"):
        uri = paths.to_uri(path)
        assert uri.isascii()
        assert paths.to_path(uri) == path


@given(st.text(max_size=60))
def test_what_is_named_is_an_absolute_path_or_refused(text: str) -> None:
    try:
        path = Paths("/home/ann").to_path(f"file:///{text}")
    except Failure:
        return
    assert path.startswith("/")
    assert not {"", ".", ".."} & set(path[1:].split("/")) or path == "/"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///workspace", "/workspace"),
        ("file:///workspace/", "/workspace"),
        ("file:///home/ann", "/workspace"),
        ("file:///home/ann/../bob", "/home/bob"),
        ("file:///home/ann/./a//b", "/workspace/a/b"),
        ("file:///home/ann/%2e%2e/bob", "/home/bob"),
        ("file:///home/annother", "/home/annother"),
        ("file:///home/user/a", "/workspace/a"),
        ("file:////etc/passwd", "/etc/passwd"),
        ("file:///../../etc/passwd", "/etc/passwd"),
    ],
)
def test_a_uri_leads_to_one_place(uri: str, path: str) -> None:
    assert Paths("/home/ann").to_path(uri) == path


@pytest.mark.parametrize(
    "uri",
    ["", "/workspace", "file://", "file:workspace", "file://host/a", "FILE:///a", "http:///a"],
)
def test_what_is_no_file_uri_is_refused(uri: str) -> None:
    with pytest.raises(Failure, match="path"):
        Paths().to_path(uri)
