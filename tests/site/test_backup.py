"""`manage.py backup` and `restore`: what is put back is what was there at one moment."""

from __future__ import annotations

import fcntl
import json
import stat
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import require
from tests.support.backups import SCRIPT, manage, rows, succeeded
from tests.support.processes import ROOT, clean_environment, free_port, started
from tests.support.site import MANAGE, prepare

pytest_plugins = ["tests.site.backup_fixtures"]


@contextmanager
def writers(url: str, api_key: str, count: int) -> Iterator[list[str]]:
    """Callers that run code all the time; the ids of what was answered so far."""
    answered: list[str] = []
    stop = threading.Event()

    def call() -> None:
        body = json.dumps({"code": SCRIPT}).encode()
        headers = {"X-API-Key": api_key, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/api/v1/executions", body, headers)
        # Not as fast as they can: a backup on a busy machine has ever more to read then.
        while not stop.wait(0.2):
            with urllib.request.urlopen(request, timeout=60) as answer:
                answered.append(json.load(answer)["id"])

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def test_a_backup_of_a_service_at_work_is_whole(tmp_path: Path) -> None:
    require("bwrap")
    data_dir, target = tmp_path / "data", tmp_path / "restored"
    api_key = prepare(data_dir).alice
    environment = clean_environment(data_dir, PORT=str(free_port()))
    with started([*MANAGE, "up"], environment, ROOT, tmp_path / "log") as service:
        service.wait_until_ready()
        with writers(service.url, api_key, 2) as answered:
            while len(answered) < 4:
                assert service.process.poll() is None, service.output
                time.sleep(0.05)
            before = set(answered)
            # What a copy of the database's file alone would not have.
            assert (data_dir / "cofferdam.sqlite3-wal").stat().st_size > 0
            succeeded(manage(data_dir, "backup", str(tmp_path / "backup.tar")))
    # It verifies the ledger, and fails where that is not intact.
    told = succeeded(manage(target, "restore", str(tmp_path / "backup.tar")))
    assert "The ledger is intact" in told
    found = {row[0] for row in rows(target, "SELECT id FROM executions_execution")}
    assert {answered_id.replace("-", "") for answered_id in before} <= found


def test_what_was_backed_up_is_put_back(archive: Path, installation: Path, tmp_path: Path) -> None:
    target = tmp_path / "restored"
    told = succeeded(manage(target, "restore", str(archive)))

    assert "The ledger is intact" in told
    for name in ("secrets.env", "credentials.txt"):
        assert (target / name).read_bytes() == (installation / name).read_bytes()
    kept = {path.relative_to(installation) for path in (installation / "artifacts").rglob("*")}
    assert {path.relative_to(target) for path in (target / "artifacts").rglob("*")} == kept
    assert sum((target / path).is_file() for path in kept) == 2
    for path in [target, *target.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert not (target / ".restoring").exists()


def test_the_outcome_as_json(data_dir: Path, tmp_path: Path) -> None:
    made = json.loads(succeeded(manage(data_dir, "backup", str(tmp_path / "b.tar"), "--json")))
    restored = manage(tmp_path / "restored", "restore", str(tmp_path / "b.tar"), "--json")
    outcome = json.loads(succeeded(restored).splitlines()[-1])

    assert made["whole"] is True
    assert outcome["intact"] is True
    assert outcome["verification"]["executions"] == 2
    assert outcome["verification"]["entries"] == made["sequence"]
    assert outcome["backup"]["ledger"] == {"sequence": made["sequence"], "digest": made["digest"]}


def test_the_archive_is_its_owners_alone_and_says_that_it_holds_secrets(
    data_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "backup.tar"
    told = manage(data_dir, "backup", str(target)).stderr
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert "IT CONTAINS UNENCRYPTED SECRETS: credentials.txt, secrets.env" in told
    assert [path.name for path in tmp_path.iterdir() if "backup.tar" in path.name] == ["backup.tar"]


def test_without_secrets_it_is_restored_with_the_keys_alone(data_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup.tar"
    told = manage(data_dir, "backup", str(target), "--without-secrets").stderr
    keys = dict(line.split("=", 1) for line in (data_dir / "secrets.env").read_text().splitlines())
    assert "UNENCRYPTED SECRETS" not in told
    content = target.read_bytes()
    secrets = (data_dir / "credentials.txt").read_text().split("=")[-1].strip()
    assert not any(key.encode() in content for key in [*keys.values(), secrets])

    refused = manage(tmp_path / "restored", "restore", str(target))
    assert refused.returncode == 2
    assert "does not hold SECRET_KEY, FERNET_KEYS, LEDGER_KEYS" in refused.stderr
    assert not list((tmp_path / "restored").iterdir())
    succeeded(manage(tmp_path / "restored", "restore", str(target), **keys))


def test_keys_of_the_environment_are_named_as_not_in_it(data_dir: Path, tmp_path: Path) -> None:
    keys = dict(line.split("=", 1) for line in (data_dir / "secrets.env").read_text().splitlines())
    (data_dir / "secrets.env").unlink()
    told = manage(data_dir, "backup", str(tmp_path / "backup.tar"), DEBUG="false", **keys).stderr
    assert "NOT INCLUDED: SECRET_KEY, FERNET_KEYS, LEDGER_KEYS" in told
    assert "UNENCRYPTED SECRETS: credentials.txt." in told


def test_through_a_pipe_and_a_program_that_encrypts(data_dir: Path, tmp_path: Path) -> None:
    gpg = [require("gpg"), "--batch", "--homedir", str(tmp_path / "gpg"), "--passphrase-file"]
    (tmp_path / "gpg").mkdir(mode=0o700)
    (tmp_path / "pass").write_text("correct horse")
    environment = clean_environment(data_dir, PORT=str(free_port()))
    write, read = f"{sys.executable} manage.py backup -", f"{sys.executable} manage.py restore -"
    options = " ".join([*gpg, str(tmp_path / "pass"), "--pinentry-mode loopback --quiet"])
    subprocess.run(
        ["bash", "-ec", f"set -o pipefail; {write} | {options} -c -o {tmp_path}/b.gpg"],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    subprocess.run(
        ["bash", "-ec", f"set -o pipefail; {options} -d {tmp_path}/b.gpg | {read}"],
        cwd=ROOT, env=environment | {"DATA_DIR": str(tmp_path / "restored")}, check=True,
    )  # fmt: skip
    subprocess.run(["gpgconf", "--homedir", str(tmp_path / "gpg"), "--kill", "all"], check=True)
    assert (tmp_path / "restored/secrets.env").exists()


def test_a_missing_file_of_an_artifact_is_named(data_dir: Path, tmp_path: Path) -> None:
    gone = next(path for path in (data_dir / "artifacts").rglob("0") if path.is_file())
    gone.unlink()
    made = manage(data_dir, "backup", str(tmp_path / "backup.tar"))
    assert made.returncode == 1
    assert f"INCOMPLETE: 1 files of artifacts were missing, such as {gone.parent.parent.name}/" in (
        made.stderr
    )


def test_a_target_that_would_overwrite_or_include_itself_is_refused(
    data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").write_text("precious")
    for target, reason in (
        (tmp_path / "there", "already exists"),
        (data_dir / "backup.tar", "would lie in DATA_DIR itself"),
        (tmp_path / "nowhere" / "backup.tar", "is not a folder"),
    ):
        refused = manage(data_dir, "backup", str(target))
        assert refused.returncode == 2
        assert reason in refused.stderr
    assert (tmp_path / "there").read_text() == "precious"


def test_a_disk_without_room_is_left_alone(data_dir: Path, tmp_path: Path) -> None:
    refused = manage(
        data_dir, "backup", str(tmp_path / "backup.tar"), DISK_RESERVE_MIB=str(100 * 1024 * 1024)
    )
    assert refused.returncode == 2
    assert "MiB are free" in refused.stderr
    assert not (tmp_path / "backup.tar").exists()


def test_one_backup_at_a_time_and_after_a_killed_one_another(
    data_dir: Path, tmp_path: Path
) -> None:
    (data_dir / "run" / "backup").mkdir(parents=True, exist_ok=True)
    (data_dir / "run" / "backup" / "copy.sqlite3").write_text("left behind")
    with (data_dir / "run" / "backup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = manage(data_dir, "backup", str(tmp_path / "backup.tar"))
        assert refused.returncode == 2
        assert "Another backup is being made" in refused.stderr
    succeeded(manage(data_dir, "backup", str(tmp_path / "backup.tar")))
    assert not (data_dir / "run" / "backup").exists()


def test_a_database_server_is_refused_with_what_to_use(tmp_path: Path) -> None:
    for command in (["backup", str(tmp_path / "b.tar")], ["restore", str(tmp_path / "b.tar")]):
        refused = manage(tmp_path / "data", *command, DATABASE_URL="postgres://u:p@nowhere/cofferdam",
                         SECRET_KEY="x" * 50, FERNET_KEYS="y" * 43, LEDGER_KEYS="z" * 43)  # fmt: skip
        assert refused.returncode == 2, refused.stderr
        assert "pg_dump" in refused.stderr
        assert "docs/deployment/backup.md" in refused.stderr
        assert (ROOT / "docs/deployment/backup.md").exists()
        assert not (tmp_path / "data").exists()
        (tmp_path / "b.tar").touch()


def test_images_of_sandboxes_are_imported_again_and_not_backed_up(
    data_dir: Path, tmp_path: Path
) -> None:
    place = data_dir / "images" / "sha256-0" / "rootfs"
    place.mkdir(parents=True)
    (place / "program").write_text("x")
    succeeded(manage(data_dir, "backup", str(tmp_path / "backup.tar")))
    with tarfile.open(tmp_path / "backup.tar") as archive:
        assert not [name for name in archive.getnames() if "images" in name.split("/")]
