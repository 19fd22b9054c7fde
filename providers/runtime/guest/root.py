"""The file systems of a sandbox in bubblewrap: a root of its own, and a private view of programs.

A view is an overlay with nothing laid over: it has inodes of its own, so that a watch or a lock on
a file of /usr is nobody else's, and it shows no path of the machine that it comes from. Where the
kernel makes none, the folder itself is bound, and `flock` reaches whoever opens the same file.
"""

import os
import stat

from . import kernel

# What bubblewrap gives the zygote: where the root is made, and where lower layers are kept.
NEW, MASKS = "/newroot", "/masks"

# The workspace by the name that clients of E2B know it by.
HOME = "/home/user"

# What the kernel tells of the whole machine and programs can do without.
_HIDDEN_FILES = ("cmdline", "diskstats", "key-users", "keys")

DEVICES = (
    *(("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9)),
    ("tty", 5, 0),
)
_LINKS_IN_DEV = (
    *(("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")),
    ("ptmx", "pts/ptmx"),
)

# Inodes take memory that no size counts. One has 0.6 to 1 KiB.
INODES = 16384
# Pseudo terminals are counted over the whole machine, which has 3072 for sandboxes: so many each
# for programs and for commands.
_TERMINALS = 16
# The same for both: where they are made by whoever asks, and opened by their user.
TERMINAL_OPTIONS = f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}"


class Layout:
    """What every sandbox of a zygote has alike, looked at once."""

    def __init__(self, described: "dict[str, object]") -> None:
        """`described` names the folders to be `views`, those `hidden` in them, and two in them:
        what /etc is made of, and a `file` and a `folder` with `nothing` in them. With
        `own_devices` every sandbox has devices of its own."""
        self.views: "list[str]" = described["views"]  # type: ignore[assignment]
        self.hidden: "list[str]" = described["hidden"]  # type: ignore[assignment]
        self.etc: str = described["etc"]  # type: ignore[assignment]
        self.nothing: str = described["nothing"]  # type: ignore[assignment]
        self.own_devices = bool(described["own_devices"])
        # The zygote's /etc is a link too, while each sandbox has a folder.
        links = (name for name in os.listdir("/") if name != "etc" and os.path.islink(f"/{name}"))
        self.links = [(name, os.readlink(f"/{name}")) for name in links]
        self.hidden_files = [name for name in _HIDDEN_FILES if os.path.exists(f"/proc/{name}")]
        self.has_pressure = os.path.isdir("/proc/pressure")
        self.uid, self.gid = os.getuid(), os.getgid()
        self.bound = False
        self._make_masks()

    def _make_masks(self) -> None:
        """Per view a layer that says of what is hidden that it is not there."""
        for view in self.views:
            os.makedirs(MASKS + view, exist_ok=True)
        for path in self.hidden:
            os.makedirs(os.path.dirname(MASKS + path), exist_ok=True)
            # Overlay's sign for a name that is gone; no device is opened by it.
            os.mknod(MASKS + path, stat.S_IFCHR, 0)

    def view(self, path: str) -> None:
        """Put the view of `path` into the new root."""
        os.makedirs(NEW + path, exist_ok=True)
        lower = f"lowerdir={MASKS}{path}:{path}"
        if not self.bound:
            try:
                kernel.mount("overlay", NEW + path, lower, read_only=True)
                return
            except OSError:
                # Before Linux 5.11 an ordinary user's namespace has no overlay.
                self.bound = True
        # What bubblewrap has bound is read-only already.
        kernel.bind(path, NEW + path)
        for hidden in self.hidden:
            if hidden.startswith(path + "/") and os.path.isdir(hidden):
                kernel.mount("tmpfs", NEW + hidden, "size=4k,nr_inodes=2", read_only=True)


def enter(layout: Layout, template: "dict[str, object]", uid: "int | None") -> None:
    """Make a root, and have it. The old one is gone from this mount namespace.

    `uid` is who the programs will be; where it is None they are who we are.
    """
    own_devices = layout.own_devices
    kernel.mount("tmpfs", NEW, "size=1m,nr_inodes=256,mode=755", devices=own_devices)
    for name, target in layout.links:
        os.symlink(target, f"{NEW}/{name}")
    for path in layout.views:
        layout.view(path)
    _fill_etc(layout, layout.uid if uid is None else uid)
    size = template["workspace_bytes"]
    _fill_dev(own_devices, bool(template["watch_memory"]), size)
    for path in (str(template["workspace"]), "/tmp"):
        os.mkdir(NEW + path)
        kernel.mount("tmpfs", NEW + path, f"size={size},nr_inodes={INODES},mode=1777")
    # Programs expect one; a view may lie in it.
    os.makedirs(f"{NEW}/root", exist_ok=True)
    os.makedirs(NEW + HOME, exist_ok=True)
    bind_home(str(template["workspace"]), NEW)
    os.mkdir(f"{NEW}/proc")
    kernel.mount("proc", f"{NEW}/proc", "", executable=False)
    # From a read-only mount, so that these are read-only as well.
    for name in layout.hidden_files:
        kernel.bind(f"{NEW}{layout.nothing}/file", f"{NEW}/proc/{name}")
    if layout.has_pressure:
        # Whoever may open these may have the kernel work for him.
        kernel.bind(f"{NEW}{layout.nothing}/folder", f"{NEW}/proc/pressure")
    kernel.change_root(NEW)
    kernel.make_read_only("/", devices=own_devices)


def bind_home(workspace: str, new: str = "") -> None:
    """The workspace by its other name as well, where there is an empty folder of that name: what a
    view of the machine's programs has there stays."""
    if os.path.isdir(new + HOME) and not os.path.islink(new + HOME) and not os.listdir(new + HOME):
        kernel.bind(new + workspace, new + HOME)


def require_one_home(workspace: str) -> None:
    """Raises RuntimeError where the other name is a folder of its own that can be written to: it
    would be somebody else's."""
    if os.access(HOME, os.W_OK) and not os.path.samefile(HOME, workspace):
        raise RuntimeError(f"{HOME} is not {workspace}, and can be written to")


def passwd(user: int) -> str:
    """The user database of a sandbox whose programs run as `user`."""
    return (
        f"root:x:0:0:root:/:/usr/sbin/nologin\nsandbox:x:{user}:{user}:sandbox:/workspace:/bin/sh\n"
    )


def group(user: int) -> str:
    """The same for groups: each user has its own."""
    return f"root:x:0:\nsandbox:x:{user}:\n"


def _fill_etc(layout: Layout, user: int) -> None:
    os.mkdir(f"{NEW}/etc")
    kernel.bind(NEW + layout.etc, f"{NEW}/etc")
    # Who the user is differs from one sandbox to the next.
    for name, text in (("passwd", passwd(user)), ("group", group(user))):
        _write(f"{NEW}/.{name}", text)
        kernel.bind(f"{NEW}/.{name}", f"{NEW}/etc/{name}", read_only=True)


def _fill_dev(own: bool, watched: bool, size: object) -> None:
    """Devices. Only root can make them; without root they are the machine's own, bound."""
    dev = f"{NEW}/dev"
    os.mkdir(dev)
    mask = os.umask(0)
    for name, major, minor in DEVICES:
        path = f"{dev}/{name}"
        if own:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            continue
        _write(path, "")
        # A shared mapping of /dev/zero is memory that belongs to no process, so that nobody but a
        # cgroup could count it. /dev/full reads the same and cannot be mapped.
        kernel.bind("/dev/full" if watched and name == "zero" else f"/dev/{name}", path)
    os.umask(mask)
    for name, target in _LINKS_IN_DEV:
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    kernel.mount("tmpfs", f"{dev}/shm", f"size={size},nr_inodes={INODES},mode=1777")
    for path in (f"{dev}/pts", NEW + kernel.TERMINALS):
        os.mkdir(path)
        kernel.mount("devpts", path, TERMINAL_OPTIONS, executable=False, devices=True)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, text.encode())
    os.close(fd)
