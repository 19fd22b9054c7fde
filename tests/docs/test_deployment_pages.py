"""Whoever follows the deployment pages word by word gets what they promise."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from django.core.management import CommandError, get_commands, load_command_class

from tests.conftest import require
from tests.support.deployment_pages import PAGES, Block, blocks_of, run
from tests.support.docker_engine import missing
from tests.support.processes import ROOT
from tests.support.servers import missing_servers
from tests.support.site import migrated_folder

# What is done in place of a block that is left to systemd, by what it begins with.
STAND_INS = {
    "systemctl daemon-reload": "start_units",
    "systemctl restart nginx": "nginx",
    "systemctl stop cofferdam.target": "stop_units",
}

LOOK = "wait_for curl --fail --silent --cacert /etc/nginx/cofferdam/tls.crt https://localhost/healthz\n"
_COMMAND = re.compile(r"^(?:.*\| |\w+=\S.*\" )?cofferdam (\w[^|\n>#]*)", re.MULTILINE)


@pytest.fixture(autouse=True)
def _a_machine_of_its_own() -> None:
    if os.geteuid() != 0:
        missing("a machine of its own needs root")
    for program in ("unshare", "bwrap", "nginx", "git", "openssl", "gpg", "systemd-analyze"):
        require(program)


def script_of(page: str, *, first: int = 0, last: int | None = None) -> str:
    """A page's blocks, each announced by its place, with stand-ins for what systemd would do."""
    lines = []
    for block in blocks_of(PAGES / page)[first:last]:
        begins = block.text.splitlines()[0]
        text = block.text if not block.reason else STAND_INS.get(begins, "")
        lines += [f"echo '== {block.name}'", text]
    return "\n".join(lines) + "\n"


def test_every_block_is_run_or_says_why_not() -> None:
    found = [block for path in PAGES.glob("*.md") for block in blocks_of(path)]
    assert len(found) > 25
    run_here = [block for block in found if not block.reason]
    assert len(run_here) > len(found) / 2
    for block in found:
        needs_more = any(
            word in block.text for word in ("systemctl", "docker ", "rsync", "10.0.0.1")
        )
        if needs_more and not block.reason:
            assert _is_rewritten(block), block.name


def _is_rewritten(block: Block) -> bool:
    """The addresses of two hosts, which the block itself replaces."""
    return "sed -i 's/10\\.0\\.0\\.11:8000/127.0.0.1:8000/" in block.text


def single_host_then_backup() -> str:
    """One machine's life: set up, used, backed up, lost, restored."""
    single = blocks_of(PAGES / "single-host.md")
    until = next(
        n
        for n, block in enumerate(single)
        if "cofferdam-pool.service" in block.text and block.reason
    )
    backup = blocks_of(PAGES / "backup.md")
    postgres = next(n for n, block in enumerate(backup) if "pg_dump" in block.text)
    single_host = script_of("single-host.md", last=until)
    # The web server takes a moment.
    asked = 'alias curl="curl'
    assert single_host.count(asked) == 1
    single_host = single_host.replace(asked, LOOK + asked)
    # What takes longest, and is the same wherever it is done.
    tables = shlex.quote(str(migrated_folder() / "cofferdam.sqlite3"))
    made = f"install -o cofferdam -g cofferdam -m 0600 {tables} /var/lib/cofferdam/\n"
    first = "cofferdam bootstrap\n"
    assert single_host.count(first) == 1
    return single_host.replace(first, made + first) + script_of("backup.md", last=postgres)


def assert_it_went_well(output: str, verified: int) -> None:
    assert '"status":"succeeded"' in output.replace(" ", "")
    assert '"stdout":"42\\n"' in output.replace(" ", "")
    assert output.count("Intact: ") >= verified
    assert "The ledger is intact" in output
    assert "System check identified no issues" in output


@pytest.mark.slow
def test_single_host_then_backup(tmp_path: Path) -> None:
    assert_it_went_well(run(single_host_then_backup(), tmp_path, 600), 2)


@pytest.mark.slow
def test_keys_and_upgrade_of_a_single_host(tmp_path: Path) -> None:
    """Its keys are rotated, it starts again, and is upgraded."""
    script = single_host_then_backup() + script_of("keys.md") + "start_units\n" + LOOK
    script += script_of("upgrade.md", last=1).replace(PULL, "") + "stop_units\n"
    assert_it_went_well(run(script, tmp_path, 600), 4)


def test_each_command_of_the_pages_takes_what_it_is_given() -> None:
    given = [
        (block.name, line)
        for path in PAGES.glob("*.md")
        for block in blocks_of(path)
        for line in _COMMAND.findall(block.text.replace("\\\n", " "))
    ]
    assert {line.split()[0] for _, line in given} >= {"rotate_keys", "restore", "verify_ledger"}
    for name, line in given:
        words = shlex.split(line)
        try:
            command = load_command_class(get_commands()[words[0]], words[0])
            command.create_parser("cofferdam", words[0]).parse_args(words[1:])
        except (KeyError, CommandError) as error:
            raise AssertionError(f"{name}: cofferdam {line}: {error}") from None


# The pull is of a clone whose origin has nothing new; there is no other commit to come to.
PULL = "git -C /opt/cofferdam pull --quiet --ff-only\n"


def test_the_readme_word_by_word(tmp_path: Path) -> None:
    start, names, first, live, session, shell = blocks_of(ROOT / "README.md")
    assert start.text == "make run"
    script = f"""
git clone --quiet . /opt/cofferdam
cd /opt/cofferdam
cp -r {shlex.quote(str(migrated_folder()))} var
make venv > /dev/null
({start.text}) > /run/service.log 2>&1 &
wait_for curl --fail --silent http://127.0.0.1:8000/healthz
{names.text}
{first.text}
{live.text}
{session.text}
{shell.text}
kill %1
wait
"""
    output = run(script, tmp_path).replace(" ", "")
    assert '{"status":"succeeded","result":{"hello":"world"},"stdout":"working\\n"}' in output
    assert [f'"type":"stdout","text":"{n}\\n"' in output for n in range(3)] == [True] * 3
    assert '{"status":"succeeded","outputs":[{"text/plain":"6"}]}' in output
    assert "42" in output


# A server of this machine, with a database for us.
POSTGRES = """
install -d -m 0755 /var/lib/pg
chown postgres /var/lib/pg
initdb=$(ls /usr/lib/postgresql/*/bin/initdb 2> /dev/null | sort -V | tail -n 1)
initdb=${initdb:-$(command -v initdb)}
runuser -u postgres -- "$initdb" -D /var/lib/pg/data -A trust > /dev/null
runuser -u postgres -- "$(dirname "$(readlink -f "$initdb")")/postgres" -D /var/lib/pg/data -k /var/lib/pg &
wait_for pg_isready -h 127.0.0.1
psql -q -h 127.0.0.1 -U postgres -c 'CREATE ROLE cofferdam SUPERUSER LOGIN' postgres
createdb -h 127.0.0.1 -U cofferdam cofferdam
"""


def test_a_dump_of_postgresql_is_restored(tmp_path: Path) -> None:
    require("pg_dump")
    if reason := missing_servers():
        missing(reason)
    backup = blocks_of(PAGES / "backup.md")
    postgres = next(n for n, block in enumerate(backup) if "pg_dump" in block.text)
    setup = (
        f"{POSTGRES}"
        """
install -d -m 0755 /var/lib/cofferdam-backups /etc/cofferdam/secrets
echo postgres://cofferdam@127.0.0.1:5432/cofferdam > /etc/cofferdam/secrets/database_url
export DATA_DIR=/var/lib/cofferdam-data DATABASE_URL_FILE=/etc/cofferdam/secrets/database_url
mkdir -p /opt/cofferdam
cp -r manage.py executions providers sandbox_site static templates deploy /opt/cofferdam/
make -v > /dev/null
cofferdam() { /opt/cofferdam/deploy/entrypoint "$@"; }
cofferdam bootstrap
if cofferdam backup /tmp/never.tar; then exit 1; fi
"""
    )
    entries = """
unset DATABASE_URL
echo "$RESTORED" > /etc/cofferdam/secrets/database_url
cofferdam checkpoint_ledger --reset "restored the dump"
cofferdam shell --command 'from executions.runs.orphaned_runs import close_after_restore; print(close_after_restore("last night"))'
cofferdam bootstrap
cofferdam verify_ledger
kill %1
"""
    text = script_of("backup.md", first=postgres, last=postgres + 2)
    output = run(setup + text + entries, tmp_path)
    assert "this command is for SQLite alone" in output
    assert "Intact: " in output


@pytest.mark.slow
def test_a_session_of_two_hosts_is_reached_from_both(tmp_path: Path) -> None:
    """Both on one machine, with the page's settings and units, and folders of their own."""
    require("redis-server")
    if reason := missing_servers():
        missing(reason)
    page = (PAGES / "two-hosts.md").read_text()
    named = page.partition("   ```\n   INSTANCE=")[2].partition("   ```")[0]
    settings = "\n".join(line.strip() for line in f"INSTANCE={named}".splitlines())
    here = {
        "STORAGE_URL=s3://cofferdam?endpoint=https://s3.example": "STORAGE_URL=/srv-cofferdam",
        "STORAGE_ACCESS_KEY_FILE=/etc/cofferdam/secrets/storage_access_key\n": "",
        "STORAGE_SECRET_KEY_FILE=/etc/cofferdam/secrets/storage_secret_key\n": "",
        "TRUSTED_PROXIES=10.0.0.10": "TRUSTED_PROXIES=10.0.0.11,10.0.0.12",
        "SHUTDOWN_DELAY_SECONDS=5": "SHUTDOWN_DELAY_SECONDS=0",
    }
    for there, value in here.items():
        assert settings.count(there) == 1
        settings = settings.replace(there, value)
    drop_in = next(b.text for b in blocks_of(PAGES / "two-hosts.md") if "pool-network" in b.text)
    script = f"""
ip address add 10.0.0.11/32 dev lo
ip address add 10.0.0.12/32 dev lo
useradd --system --user-group --home-dir /var/lib/cofferdam --shell /usr/sbin/nologin cofferdam
mkdir -p /opt/cofferdam /srv-cofferdam
chown cofferdam /srv-cofferdam
cp -r manage.py executions providers sandbox_site static templates deploy /opt/cofferdam/
make -v > /dev/null
{POSTGRES}
redis-server --bind 127.0.0.1 --save "" > /dev/null &
cd /opt/cofferdam
deploy/make-secrets /etc/cofferdam/secrets cofferdam
for name in database_url redis_url; do chmod 0640 /etc/cofferdam/secrets/$name; done
echo postgres://cofferdam@127.0.0.1:5432/cofferdam > /etc/cofferdam/secrets/database_url
echo redis://127.0.0.1:6379/0 > /etc/cofferdam/secrets/redis_url
install -m 0644 deploy/systemd/cofferdam*.service deploy/systemd/cofferdam.target /etc/systemd/system/
{drop_in}
for host in 1 2; do
    install -d -o cofferdam -g cofferdam -m 0700 /var/lib/cofferdam-$host
    cat deploy/cofferdam.env - > /etc/cofferdam/host-$host.env << SETTINGS
{settings}
DATA_DIR=/var/lib/cofferdam-$host
INSTANCE=host-$host
HOST=10.0.0.1$host
SETTINGS
done
start_host() {{ install -m 0644 /etc/cofferdam/host-$1.env /etc/cofferdam/cofferdam.env; shift; start_units "$@"; }}
export COFFERDAM_ENV=/etc/cofferdam/host-1.env
deploy/cofferdam bootstrap
start_host 1 cofferdam-pool.service cofferdam-web.service cofferdam-worker.service
wait_for curl --fail --silent -H 'Host: 127.0.0.1' http://10.0.0.11:8000/readyz
# Its pool is for the provider local alone.
rm /etc/systemd/system/cofferdam-pool.service.d/pool-network.conf
start_host 2 cofferdam-pool.service cofferdam-web.service cofferdam-worker.service
wait_for curl --fail --silent -H 'Host: 127.0.0.1' http://10.0.0.12:8000/readyz
key=$(sed -n 's/^API_KEY=//p' /var/lib/cofferdam-1/credentials.txt)
ask() {{
    curl --fail-with-body --silent -H 'Host: 127.0.0.1' -H 'X-Forwarded-Proto: https' -H "X-API-Key: $key" \\
        -H 'Content-Type: application/json' "http://10.0.0.1$1:8000/api/v1/$2" -d "$3"
}}
ask 1 sessions '{{"name": "both"}}' > /run/session || {{ cat /run/session; exit 1; }}
id=$(python3 -c 'import json; print(json.load(open("/run/session"))["id"])')
ask 1 sessions/$id/executions '{{"code": "x = 41"}}'
ask 2 sessions/$id/executions '{{"code": "print(x + 1)"}}'
stop_units
"""
    output = run(script, tmp_path, 600).replace(" ", "")
    assert '"stdout":"42\\n"' in output
    assert '"provider":"self_managed"' in output


def test_the_proxy_goes_to_the_other_host_when_one_is_away(tmp_path: Path) -> None:
    script = """
install -d /opt/cofferdam /etc/nginx/conf.d
cp -r deploy /opt/cofferdam/
deploy/make-secrets /tmp-secrets root
install -D -m 0600 -t /etc/nginx/cofferdam /tmp-secrets/tls.crt /tmp-secrets/tls.key
install -m 0644 deploy/nginx/cofferdam.conf /etc/nginx/conf.d/cofferdam.conf
rm -f /etc/nginx/sites-enabled/default
"""
    servers = """
cat > /run/host.py << 'PYTHON'
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Host(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        said = f"{sys.argv[1]} {len(body)} {self.headers['X-Forwarded-For']} {self.headers['X-Forwarded-Proto']}\\n".encode()
        with open("/run/asked", "a") as asked: asked.write(sys.argv[1] + "\\n")
        if body == b"die": self.close_connection = True; self.connection.shutdown(2); return
        self.send_response(200); self.send_header("Content-Length", str(len(said))); self.end_headers()
        self.wfile.write(said)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Host).serve_forever()
PYTHON
python3 /run/host.py 8000 > /dev/null 2>&1 & first=$!
python3 /run/host.py 8001 > /dev/null 2>&1 &
for port in 8000 8001; do wait_for curl --silent --max-time 5 -d x http://127.0.0.1:$port/; done
nginx
ask() { curl --silent --max-time 20 --cacert /etc/nginx/cofferdam/tls.crt -H 'X-Forwarded-For: 6.6.6.6' https://localhost/api "$@"; }
wait_for ask -d x
for _ in 1 2 3 4 5 6; do ask -d x; done > /run/both
grep -q '^8000 1 127.0.0.1 https' /run/both
grep -q '^8001 1 127.0.0.1 https' /run/both
head -c 68000000 /dev/zero > /run/large
ask --data-binary @/run/large | grep -q ' 68000000 '
echo "large bodies pass"
kill $first
for _ in 1 2 3 4 5 6; do ask -d x; done | sort | uniq -c | grep -q '6 8001 1'
echo "nobody noticed that one is away"
: > /run/asked
[ "$(ask -o /dev/null -w '%{http_code}' -d die)" = 502 ]
[ "$(wc -l < /run/asked)" = 1 ]
echo "what was sent is not sent again"
kill $(jobs -p) $(cat /run/nginx.pid)
"""
    blocks = blocks_of(PAGES / "two-hosts.md")
    configured = next(block for block in blocks if not block.reason)
    output = run(script + configured.text + servers, tmp_path)
    for line in (
        "large bodies pass",
        "nobody noticed that one is away",
        "what was sent is not sent again",
    ):
        assert line in output
