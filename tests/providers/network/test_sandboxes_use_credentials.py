"""Programs in sandboxes use credentials that they never have, under every launcher."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from providers.credentials import Credential, Placement
from providers.network import NETWORK, Layer, Network, NetworkPolicy
from providers.remote.secret import Secret
from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Command, Event, ExecutionResult, Job, SandboxSpec
from tests.providers.network.upstreams import Upstream, upstreams
from tests.support.pool_service import over_docker, provider_of, running
from tests.support.processes import free_port
from tests.support.required import require

LAUNCHERS = ("bubblewrap", "runc", "gvisor", "docker")
# Their sandboxes have this machine's programs; the images of the engine have no curl.
WITH_PROGRAMS = ("bubblewrap", "runc", "gvisor")
TIMEOUT = 60.0
VALUE = "s3cr3t/value+of-the-test=="
MASKED = "*" * len(VALUE)

PYTHON = "import urllib.request as u; print(u.urlopen(URL).read().decode())"
CURL = """
import subprocess
print(subprocess.run(["curl", "-sS", URL], capture_output=True, text=True))
"""
REQUESTS = """
import os, requests
print(requests.get(URL, headers={"Authorization": "Bearer " + os.environ["API_TOKEN"]}).text)
"""
NODE = """
const https = require("https")
https.get(URL, r => r.on("data", d => console.log(d.toString())))
"""


class Bound:
    """A provider over one launcher, and a server that a credential is bound to."""

    def __init__(self, provider: SelfManagedProvider, server: Upstream) -> None:
        self.provider, self.server = provider, server

    def credential(
        self, placement: Placement = "bearer", field: str = "", path: str = ""
    ) -> Credential:
        rule = f"https://{self.server.rule}{path}"
        value = Secret(VALUE)
        return Credential("1", "api", 3, placement, field, (rule,), "API_TOKEN", value)

    def network(self, *credentials: Credential) -> Network:
        policy = NetworkPolicy.parse("allowlist", [self.server.rule])
        return Network((Layer("tenant", policy),), credentials=credentials or (self.credential(),))

    def run(
        self, code: str, network: Network | None = None, language: str = "python"
    ) -> ExecutionResult:
        """Run code in a sandbox of its own. URL is the server's, which answers with the request."""
        sandbox = self.provider.open(
            SandboxSpec(language, network=network or self.network()), "alice"
        )
        begin = "const " if language == "nodejs" else ""
        text = f"{begin}URL = {self.server.url + '/echo'!r}\n{textwrap.dedent(code)}"
        try:
            return sandbox.run(Job(text, language, TIMEOUT))
        finally:
            sandbox.close()


@pytest.fixture(scope="module", params=LAUNCHERS)
def bound(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bound]:
    launcher = request.param
    folder = tmp_path_factory.mktemp(launcher)
    with ExitStack() as stack:
        _, secure, authority = stack.enter_context(upstreams(folder))
        ca_file = folder / "trusted.pem"
        ca_file.write_text(authority)
        options = {"NETWORK_ALLOWED_ADDRESSES": "127.0.0.0/8", "NETWORK_CA_FILE": str(ca_file)}
        if launcher == "docker":
            request.getfixturevalue("engine")
            pool = stack.enter_context(over_docker(free_port(), folder / "log", **options))
        else:
            require({"bubblewrap": "bwrap", "gvisor": "runsc"}.get(launcher, launcher))
            log = folder / "log"
            pool = stack.enter_context(running(log, "--launcher", launcher, **options))
        provider = stack.enter_context(provider_of(pool.url, pool_size=1, timeout=60))
        yield Bound(provider, secure)


def _skip_without_programs(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["bound"] not in WITH_PROGRAMS:
        pytest.skip("the images of the engine have no such program")


def _assert_used(result: ExecutionResult, bound: Bound) -> None:
    """The server was sent the value, and the program saw that it was sent something."""
    assert bound.server.headers[-1]["Authorization"] == f"Bearer {VALUE}", result
    assert f"authorization: Bearer {MASKED}" in result.stdout, result
    assert VALUE not in repr(result)
    (attempt,) = result.metadata[NETWORK]["attempts"]
    assert (attempt["method"], attempt["path"]) == ("GET", "/echo")
    assert (attempt["outcome"], attempt["credential"]) == ("allowed", "api@3")


def test_python_uses_a_credential_and_trusts_the_proxy_by_itself(bound: Bound) -> None:
    _assert_used(bound.run(PYTHON), bound)


@pytest.mark.parametrize(("code", "language"), [(CURL, "python"), (NODE, "nodejs")])
def test_other_clients_trust_the_proxy_by_themselves(
    request: pytest.FixtureRequest, bound: Bound, code: str, language: str
) -> None:
    if language == "python":
        _skip_without_programs(request)
    _assert_used(bound.run(code, language=language), bound)


def test_a_program_sends_the_placeholder_of_its_variable(bound: Bound) -> None:
    code = """
    import os, urllib.request as u
    token = os.environ["API_TOKEN"]
    print(token)
    print(u.urlopen(u.Request(URL, headers={"X-Key": token})).read().decode())
    """
    credential = bound.credential("header", "X-Key")
    result = bound.run(code, bound.network(credential))
    assert result.stdout.startswith("cfd-secret:api\n"), result
    assert bound.server.headers[-1]["X-Key"] == VALUE
    assert f"X-Key: {MASKED}".lower() in result.stdout.lower()


def test_no_byte_of_a_value_is_in_the_sandbox(bound: Bound) -> None:
    code = f"""
    import os, glob, urllib.request as u
    u.urlopen(URL).read()
    value = {VALUE[::-1]!r}[::-1].encode()
    own = {{"/proc/self/maps", "/proc/self/mem"}}
    found = [k for k, v in os.environ.items() if value in (k + v).encode()]
    for root in ("/proc/self", "/proc/1", "/tmp", "/workspace", "/run", "/etc"):
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    if path not in own and os.path.isfile(path):
                        content = open(path, "rb").read(1 << 20)
                        found += [path] if value in content else []
                except OSError:
                    pass
    pem = open(os.environ["SSL_CERT_FILE"]).read()
    print(found, "PRIVATE KEY" in pem)
    """
    assert bound.run(code).stdout == "[] False\n"


def test_a_credential_for_another_path_is_refused_with_its_reason(bound: Bound) -> None:
    code = """
    import os, urllib.request as u, urllib.error
    try:
        u.urlopen(u.Request(URL, headers={"Authorization": "Bearer " + os.environ["API_TOKEN"]}))
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
    """
    before = len(bound.server.requests)
    result = bound.run(code, bound.network(bound.credential(path="/other")))
    assert result.stdout.startswith("403 "), result
    assert "cfd-secret:api" in result.stdout
    assert len(bound.server.requests) == before
    (attempt,) = result.metadata[NETWORK]["attempts"]
    assert (attempt["outcome"], attempt["why"]) == ("refused", "credential")


def test_methods_and_paths_hold_within_tls(bound: Bound) -> None:
    code = """
    import urllib.request as u, urllib.error
    for method, url in (("GET", URL), ("POST", URL), ("GET", URL + "/../large")):
        try:
            print(method, u.urlopen(u.Request(url, method=method)).status)
        except urllib.error.HTTPError as error:
            print(method, error.code)
    """
    rule = f"GET https://{bound.server.rule}/echo"
    network = Network((Layer("tenant", NetworkPolicy.parse("allowlist", [rule])),))
    assert bound.run(code, network).stdout == "GET 200\nPOST 403\nGET 403\n"


def test_a_session_loses_a_revoked_credential_with_its_next_request(bound: Bound) -> None:
    sandbox = bound.provider.open(SandboxSpec(kept=True, network=bound.network()), "alice")
    assert isinstance(sandbox, KeptSandbox)
    code = f"""
import http.client, ssl
try:
    connection
except NameError:
    connection = http.client.HTTPConnection("127.0.0.1", 3128)
    connection.set_tunnel("127.0.0.2", {bound.server.port})
    connection.connect()
    context = ssl.create_default_context()
    connection.sock = context.wrap_socket(connection.sock, server_hostname="127.0.0.2")
connection.request("GET", "/echo", headers={{"Host": "127.0.0.2:{bound.server.port}"}})
print(connection.getresponse().read().decode())
"""
    try:
        sandbox.run(Job(code, "python", TIMEOUT))
        assert bound.server.headers[-1]["Authorization"] == f"Bearer {VALUE}"
        newer = replace(bound.credential(), version=4, value=Secret("another-value"))
        bound.provider.change_credentials({"1": newer})
        sandbox.run(Job(code, "python", TIMEOUT))
        assert bound.server.headers[-1]["Authorization"] == "Bearer another-value"
        bound.provider.change_credentials({"1": None})
        result = sandbox.run(Job(code, "python", TIMEOUT))
        assert bound.server.headers[-1]["Authorization"] is None, result
    finally:
        sandbox.close()


def test_commands_of_a_session_trust_the_proxy(bound: Bound) -> None:
    sandbox = bound.provider.open(SandboxSpec(kept=True, network=bound.network()), "alice")
    assert isinstance(sandbox, KeptSandbox)
    code = f"import urllib.request as u; u.urlopen({bound.server.url + '/echo'!r}).read()"
    try:
        process = sandbox.processes.start(Command(("python3", "-c", code), timeout=TIMEOUT))
        ended = sandbox.processes.follow(process.pid, lambda _: None)
        assert ended.exit_code == 0
        assert bound.server.headers[-1]["Authorization"] == f"Bearer {VALUE}"
    finally:
        sandbox.close()


def test_the_usual_network_is_not_opened(bound: Bound) -> None:
    code = """
    import os, ssl, urllib.request as u, urllib.error
    print("SSL_CERT_FILE" in os.environ, "API_TOKEN" in os.environ)
    try:
        u.urlopen(URL)
    except urllib.error.URLError as error:
        print(type(error.reason).__name__)
    """
    network = Network((Layer("tenant", NetworkPolicy.parse("allowlist", [bound.server.rule])),))
    assert bound.run(code, network).stdout == "False False\nSSLCertVerificationError\n"


def test_an_attempt_is_an_event_of_the_run_that_made_it(bound: Bound) -> None:
    job = Job(f"URL = {bound.server.url + '/echo'!r}\n{PYTHON}\nprint('end')", "python", TIMEOUT)
    single = bound.provider.open(SandboxSpec(network=bound.network()), "alice")
    kept = bound.provider.open(SandboxSpec(kept=True, network=bound.network()), "alice")
    for sandbox in (single, kept):
        events: list[Event] = []
        try:
            result = sandbox.run(job, events.append)
        finally:
            sandbox.close()
        (attempt,) = [event.attempt for event in events if event.type == "network"]
        assert attempt == result.metadata[NETWORK]["attempts"][0]
