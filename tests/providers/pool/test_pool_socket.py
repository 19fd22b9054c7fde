"""The service's socket in the data directory is its own user's, and one service's at a time."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from providers.errors import ConnectionFailed, InvalidConfiguration
from providers.runtime.service import unix_socket
from providers.runtime.service.settings import FIELDS
from providers.schema import validate
from providers.self_managed.client import PoolClient


@pytest.fixture(params=["short", "longer than an address"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    names = [] if request.param == "short" else ["x" * 100, "y" * 100]
    return unix_socket.socket_path(tmp_path.joinpath(*names))


def test_only_its_own_user_reaches_it(path: Path) -> None:
    with unix_socket.alone(path), unix_socket.listen(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert unix_socket.answers(path)
    assert not unix_socket.answers(path)


def test_a_second_service_is_refused_and_the_first_goes_on(path: Path) -> None:
    with unix_socket.alone(path), unix_socket.listen(path):
        with (
            pytest.raises(InvalidConfiguration, match="Another service listens"),
            unix_socket.alone(path),
        ):
            unix_socket.listen(path)
        assert unix_socket.answers(path)
    with unix_socket.alone(path):
        assert not unix_socket.answers(path)


def test_what_a_killed_service_has_left_is_replaced(path: Path) -> None:
    with unix_socket.alone(path):
        unix_socket.listen(path).close()
        assert path.exists()
        with unix_socket.listen(path):
            assert unix_socket.answers(path)


def test_a_service_that_ends_leaves_no_socket(path: Path) -> None:
    with unix_socket.alone(path):
        unix_socket.listen(path).close()
    assert [each.name for each in path.parent.iterdir()] == ["pool.lock"]


def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "pool.sock"
    with pytest.raises(InvalidConfiguration, match="Cannot listen"), unix_socket.alone(path):
        unix_socket.listen(path)


def test_a_client_without_a_service_is_told_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 0.2)
    client = PoolClient("", "", 0, validate(FIELDS, {}), socket=path)
    with pytest.raises(ConnectionFailed, match="does not answer") as caught:
        client.ask_of("GET", "x")
    assert caught.value.nothing_ran
