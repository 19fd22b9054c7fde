#!/bin/sh
# Install this bundle: ./install.sh [FOLDER]   (/opt/cofferdam)
# Needs python3 as the bundle was made for, and no network. As root it installs bubblewrap if there
# is none. Calling it again installs a newer bundle over an older one; the data in var/ stays.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
target=${1:-/opt/cofferdam}
python=${PYTHON:-/usr/bin/python3}
umask 022

fail() {
    echo "$1" >&2
    exit 1
}

[ -x "$python" ] || python=$(command -v python3) || fail "Python is missing. Install python3, or name it: PYTHON=..."
(cd "$here" && sha256sum --check --quiet --strict SHA256SUMS) || fail "The bundle is damaged: unpack it again."
"$python" - "$here/made-for.json" <<'CHECK' || exit 1
import json, platform, sys
wanted = json.load(open(sys.argv[1]))
found = {
    "machine": platform.machine(),
    "python": ".".join(platform.python_version_tuple()[:2]),
    "system": platform.freedesktop_os_release().get("VERSION_CODENAME", ""),
}
other = [f"{name} {wanted[name]}, here {found[name]}" for name in found if wanted[name] != found[name]]
if other:
    sys.exit("The bundle was made for another machine: " + "; ".join(other) + ". Make one on such a machine, or name another interpreter: PYTHON=...")
CHECK

if ! command -v bwrap >/dev/null; then
    missing=
    for package in "$here"/debian/*.deb; do
        name=$(dpkg-deb --field "$package" Package)
        dpkg-query --show --showformat='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed \
            || missing="$missing $package"
    done
    if [ "$(id -u)" = 0 ]; then
        echo "Installing bubblewrap ..."
        # shellcheck disable=SC2086
        dpkg --install $missing >/dev/null
    else
        echo "bubblewrap is missing, so nothing can be run locally. Install it: sudo dpkg --install$missing" >&2
    fi
fi

echo "Installing into $target ..."
mkdir -p "$target"
cp -R "$here/project/." "$target/"
venv=$target/.venv
# Without its own pip: Debian keeps that in a package of its own, which may not be here.
"$python" -m venv --clear --without-pip "$venv"
pip=$(ls "$here"/wheels/pip-*.whl)
PYTHONPATH=$pip "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-index --find-links "$here/wheels" --no-deps --no-compile --root-user-action=ignore \
    --require-hashes -r "$here/wheels.txt"
# As `make venv` leaves it: it then has nothing to install.
cp "$target/requirements.txt" "$venv/"
"$venv/bin/python" "$target/bundle/load.py"

if [ -d "$here/packages" ]; then
    # A service without them runs all the same.
    PYTHONPATH=$pip PIP_NO_INDEX=1 PIP_FIND_LINKS=$here/packages \
        "$venv/bin/python" "$target/manage.py" packages --node-from "$here/packages/node" || true
fi

if [ -d "$here/images" ]; then
    "$venv/bin/python" - "$here"/images/*.tar.gz <<'LOAD'
import docker, sys
try:
    client = docker.from_env(timeout=900)
except docker.errors.DockerException:
    sys.exit()
for path in sys.argv[1:]:
    print("Loading", path, "...", flush=True)
    with open(path, "rb") as packed:
        client.images.load(packed)
LOAD
fi

cat <<NEXT
Installed. Now, as the user it is to run as:
  $venv/bin/python $target/manage.py bootstrap
  $venv/bin/python $target/manage.py up
NEXT
