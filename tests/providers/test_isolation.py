"""A program in a sandbox sees nothing of this machine, and can do nothing to it."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from providers.runtime.pool.template import NPM_RETRIES
from tests.conftest import require
from tests.support.sandboxes import Local


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of this machine's loopback that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            yield port


def test_there_is_no_network_but_an_empty_loopback(local: Local) -> None:
    result = local.run("import socket\nprint([name for _, name in socket.if_nameindex()])")
    assert result.stdout == "['lo']\n"


def test_nothing_of_the_host_can_be_reached(local: Local, listener: int) -> None:
    addresses = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None)}
    with socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0cofferdam-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
            import socket
            for address in {sorted(addresses | {"127.0.0.1", "8.8.8.8", "169.254.169.254"})!r}:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                with socket.socket(family) as connection:
                    connection.settimeout(1)
                    try:
                        connection.connect((address, {listener}))
                        print("reached", address)
                    except OSError:
                        pass
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect({name!r})
                    print("reached the abstract socket")
                except OSError:
                    pass
            try:
                socket.getaddrinfo("example.com", 80)
                print("resolved a name")
            except OSError:
                print("alone")
        """
        assert local.run(code).stdout == "alone\n"


def test_only_ordinary_sockets_can_be_made(local: Local) -> None:
    """A VSOCK one would reach the hypervisor: that family has no namespaces."""
    code = """
        import socket
        for family in range(50):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                try:
                    socket.socket(family, kind)
                except OSError:
                    continue
                print(socket.AddressFamily(family).name)
                break
    """
    made = set(local.run(code).stdout.split())
    assert made <= {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}
    assert "AF_UNIX" in made


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_nothing_of_our_environment_is_passed_on(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[launcher])
    monkeypatch.setenv("PLANTED", "planted-secret")
    local = Local(launcher, pool_size=1)
    try:
        assert "planted-secret" not in local.run("export; cat /proc/self/environ", "bash").stdout
        code = "import glob, os\nprint(sorted(os.environ))\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try: print(open(path).read())\n    except OSError: pass"  # fmt: skip
        seen = local.run(code).stdout
    finally:
        local.close()
    assert "planted-secret" not in seen
    allowed = {"PATH", "HOME", "LANG", "TMPDIR", "PWD", "LC_CTYPE", "MPLBACKEND", "MPLCONFIGDIR"}
    allowed |= {NPM_RETRIES}
    assert set(eval(seen.splitlines()[0])) <= allowed


def test_no_file_of_this_machine_is_there_but_its_programs(local: Local) -> None:
    paths = [
        *("/root/.profile", "/usr/local", "/etc/shadow", "/etc/hostname", "/var", "/run", "/boot"),
        *("/opt", "/srv", "/mnt", "/media"),
        str(django_settings.DATA_DIR),
        str(django_settings.BASE_DIR),
        __file__,
        "/proc/1/root/etc/hosts",
        "/proc/1/cwd/..",
    ]
    if local.launcher == "gvisor":
        # An empty folder lies over it.
        paths.remove("/usr/local")
    else:  # gVisor's own devices are none of the host's
        paths += ["/dev/kmsg", "/dev/mem", "/dev/sda", "/dev/vda", "/dev/fuse"]
    code = f"import os\nprint([path for path in {paths!r} if os.path.lexists(path)])"
    assert local.run(code).stdout == "[]\n"
    # An empty folder for root, the workspace by another name, and nobody's home.
    code = (
        "import os\nprint(os.listdir('/root'), os.listdir('/home'), "
        "os.path.samefile('/home/user', '/workspace'))"
    )
    assert local.run(code).stdout == "[] ['user'] True\n"


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_a_data_directory_among_the_programs_is_hidden(launcher: str, settings: Any) -> None:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[launcher])
    if not os.access("/usr/local", os.W_OK):
        pytest.skip("only for whoever may write below /usr")
    with tempfile.TemporaryDirectory(dir="/usr/local", prefix="cofferdam-test-") as folder:
        settings.DATA_DIR = Path(folder)
        secret = Path(folder, "secret")
        secret.write_text("secret")
        for path in (Path(folder), secret):
            path.chmod(0o755)
        local = Local(launcher, pool_size=1)
        try:
            code = f"import os\nprint(os.path.exists({folder!r}) and os.listdir({folder!r}) or [])"
            result = local.run(code)
            assert (result.stdout, result.stderr) == ("[]\n", "")
        finally:
            local.close()


def test_only_the_own_places_can_be_written_to(local: Local) -> None:
    code = """
        import os
        for folder, folders, names in os.walk("/"):
            folders[:] = [name for name in folders if name not in ("proc", "sys") and folder.count("/") < 2]
            try:
                with open(os.path.join(folder, ".probe"), "w"):
                    print(folder)
                os.unlink(os.path.join(folder, ".probe"))
                folders.clear()
            except OSError:
                pass
            for name in names:
                path = os.path.join(folder, name)
                if not path.startswith("/dev/") and not os.path.islink(path) and os.access(path, os.W_OK):
                    print(path)
    """
    # The workspace has two names.
    found = local.run(code, timeout=30).stdout.replace("/home/user", "/workspace").split()
    assert {"/workspace", "/tmp", "/dev/shm"} <= set(found)
    assert set(found) <= {"/workspace", "/tmp", "/dev/shm", "/workspace/main.py"}


def test_no_setting_of_the_kernel_can_be_written(local: Local) -> None:
    code = """
        import os
        for folder, folders, names in os.walk("/proc"):
            # Whoever may read /proc/pressure may ask there to be woken.
            folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self", "pressure")]
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path) and os.access(path, os.W_OK):
                    try:
                        fd = os.open(path, os.O_RDWR)
                        os.pwrite(fd, os.pread(fd, 4096, 0), 0)
                        print(path)
                    except OSError:
                        pass
        print("looked")
    """
    assert local.run(code, timeout=30).stdout == "looked\n"


def test_only_the_own_processes_are_there(local: Local) -> None:
    code = "import os\nprint(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))"
    assert local.run(code).stdout == "[1, 2]\n"


def test_two_sandboxes_share_nothing_one_after_the_other(local: Local) -> None:
    places = ("/workspace", "/tmp", "/dev/shm")
    local.run(f"for place in {places!r}: open(place + '/left', 'w').write('secret')")
    for _ in range(3):
        result = local.run(f"import os\nprint([os.listdir(place) for place in {places!r}])")
        assert result.stdout in ("[['main.py', 'artifacts'], [], []]\n", "[['artifacts', 'main.py'], [], []]\n")  # fmt: skip


def test_two_sandboxes_share_nothing_at_the_same_time(local: Local) -> None:
    code = """
        import ctypes, os, socket, sys, time
        libc = ctypes.CDLL(None)
        for place in ("/workspace", "/tmp", "/dev/shm"):
            open(f"{place}/{number}", "w").close()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\\0name-{number}")
        server = socket.create_server(("127.0.0.1", 5000))
        libc.shmget(1000 + number, 4096, 0o1666)
        time.sleep(1)
        other = 1 - number
        seen = [place for place in ("/workspace", "/tmp", "/dev/shm") if os.path.exists(f"{place}/{other}")]
        try:
            socket.socket(socket.AF_UNIX).connect(f"\\0name-{other}")
            seen.append("abstract socket")
        except OSError:
            pass
        if libc.shmget(1000 + other, 4096, 0) != -1:
            seen.append("shared memory")
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
        print(seen, len(processes))
    """
    ready = threading.Barrier(2)

    def run(number: int) -> str:
        ready.wait()
        return local.run(f"number = {number}\n{textwrap.dedent(code)}").stdout

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == ["[] 2\n", "[] 2\n"]


def test_two_sandboxes_draw_different_random_numbers(local: Local) -> None:
    """They may come of one and the same process."""
    code = "import os, random, secrets, uuid\nprint(random.random(), uuid.uuid4(), secrets.token_hex(8))"
    drawn = [local.run(code).stdout.split() for _ in range(3)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3


def test_the_namespaces_are_not_the_hosts(bubblewrap: Local) -> None:
    kinds = ["cgroup", "ipc", "mnt", "net", "pid", "uts"]
    if os.geteuid() != 0:
        # As root every sandbox has a user id of its own instead.
        kinds.append("user")
    code = f"import os\nfor kind in {kinds!r}: print(os.readlink(f'/proc/self/ns/{{kind}}'))"
    inside = bubblewrap.run(code).stdout.split()
    assert len(inside) == len(kinds)
    assert not set(inside) & {os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}


def test_every_result_says_what_isolated_it(local: Local) -> None:
    for code in ("print(1)", "raise ValueError", "while True: pass"):
        assert local.run(code, timeout=0.6).metadata["runtime"] == local.launcher


def test_gvisor_is_really_in_between(gvisor: Local) -> None:
    code = """
        import ctypes
        buffer = ctypes.create_string_buffer(10_000)
        ctypes.CDLL(None).klogctl(3, buffer, len(buffer))
        print(buffer.value.decode())
    """
    assert "Starting gVisor" in gvisor.run(code).stdout


def test_the_kernel_is_the_hosts_in_bubblewrap(bubblewrap: Local) -> None:
    """The counterpart of the test above: it can tell the two apart."""
    result = bubblewrap.run("print(open('/proc/sys/kernel/osrelease').read().strip())")
    assert result.stdout.strip() == platform.release()
