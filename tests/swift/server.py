"""OpenStack Swift with its S3 API, all of it in one process: `python server.py FOLDER PORT SECRET`.

Run by the Python of the environment that `.ci/install-swift` makes, where nothing of ours is.
"""

import os
import pwd
import secrets
import sys
from pathlib import Path

import eventlet
import eventlet.wsgi
from swift.common import storage_policy, utils, wsgi
from swift.common.ring import RingBuilder

DEFAULTS = """
[DEFAULT]
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
log_address = {folder}/no-log
fallocate_reserve = 0
disable_fallocate = true
"""

BACKEND = """
[app:main]
use = egg:swift#{kind}
disk_chunk_size = 1048576
network_chunk_size = 1048576
"""

PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats s3api tempauth slo proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
client_chunk_size = 1048576
object_chunk_size = 1048576

[filter:catch_errors]
use = egg:swift#catch_errors

[filter:gatekeeper]
use = egg:swift#gatekeeper

[filter:listing_formats]
use = egg:swift#listing_formats

[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
auth_pipeline_check = false

[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin

[filter:slo]
use = egg:swift#slo
"""


def main(folder: Path, port: int, secret: str) -> None:
    (folder / "devices" / "disk").mkdir(parents=True, exist_ok=True)
    conf = folder / "swift.conf"
    if not conf.exists():
        suffix = secrets.token_hex(8)
        conf.write_text(
            f"[swift-hash]\nswift_hash_path_suffix = {suffix}\n"
            "[storage-policy:0]\nname = one\ndefault = yes\n"
        )
    # Nothing is forced to the disk, for what is kept here is a test's.
    os.fsync = os.fdatasync = lambda descriptor: None
    utils.set_swift_dir(str(folder))
    storage_policy.reload_storage_policies()
    utils.monkey_patch()

    # What a server listens on it keeps, so that the rings name nobody else's port.
    sockets = {"proxy": eventlet.listen(("127.0.0.1", port))}
    for kind in ("account", "container", "object"):
        sockets[kind] = eventlet.listen(("127.0.0.1", 0))
        _write_ring(folder, kind, sockets[kind].getsockname()[1])
    threads = []
    for kind, sock in sockets.items():
        path = folder / f"{kind}.conf"
        rest = PROXY if kind == "proxy" else BACKEND
        path.write_text(
            (DEFAULTS + rest).format(
                folder=folder,
                port=sock.getsockname()[1],
                user=pwd.getpwuid(os.getuid()).pw_name,
                secret=secret,
                kind=kind,
            )
        )
        threads.append(eventlet.spawn(_serve, path, sock))
    for thread in threads:
        thread.wait()


def _serve(path: Path, sock: object) -> None:
    app = wsgi.loadapp(str(path), global_conf={"log_name": path.stem})
    # As it is without this, clients of S3 do not find the ETag.
    eventlet.wsgi.server(
        sock,
        app,
        log_output=False,
        protocol=wsgi.SwiftHttpProtocol,
        capitalize_response_headers=False,
    )


def _write_ring(folder: Path, kind: str, port: int) -> None:
    builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
    builder.add_dev(
        {
            "id": 0,
            "region": 1,
            "zone": 1,
            "weight": 1.0,
            "ip": "127.0.0.1",
            "port": port,
            "device": "disk",
        }
    )
    builder.rebalance(seed=1)
    builder.get_ring().save(str(folder / f"{kind}.ring.gz"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
