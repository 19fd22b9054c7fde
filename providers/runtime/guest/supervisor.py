"""The first process of a sandbox: takes a request, has a child run it, answers once.

The host's channel is descriptors 0 (in) and 1 (out). User code runs in a child with pipes of its
own; being process 1 the supervisor cannot be signalled from inside, and being non-dumpable it
cannot be read or traced. When it ends, the kernel ends everything else in the sandbox.

It ends after one request, unless that says `again`: then the sandbox is emptied, verified to be
as it was, and given a new child forked from this interpreter, which never runs user code.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import gc
import os
import select
import sys
import time

from . import network, preload, python_runner, wire
from .child import EXHAUSTED, STOP, bounds
from .kernel import adopt_orphans, close_to_others
from .memory import Memory
from .process_tree import Child
from .request import Run, answer
from .scrub import PLACES, Untouched
from .warm_image import fill_tmp

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import NoReturn


def main(notices: int = -1) -> None:
    """Be the first process for the template given as JSON in argv[1], channel on 0 and 1.

    `notices` is a descriptor for them that was opened before system calls were filtered.
    """
    template: "dict[str, object]" = wire.loads(sys.argv[1])  # type: ignore[assignment]
    template["notices"] = notices
    if template.get("binds_home"):
        # Only here: gVisor makes no such mount by itself.
        from . import kernel, root

        root.bind_home(str(template["workspace"]))
        kernel.keep_capabilities(kernel.OF_A_SUPERVISOR)
    channel_in, channel_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    supervise(template, channel_in, channel_out)


def supervise(template: "dict[str, object]", channel_in: int, channel_out: int) -> None:
    """Serve the requests that come over the channel. Never returns.

    What goes wrong before the sandbox is ready is told over the channel.
    """
    os.umask(0o022)
    # Free numbers that the child's pipes are to have would be given to others.
    while (taken := os.dup(0)) <= STOP:
        continue
    os.close(taken)
    close_to_others()
    os.chdir(str(template["workspace"]))
    os.environ["PWD"] = os.getcwd()
    adopt_orphans()
    wakeup, wakeup_in = os.pipe()
    os.set_blocking(wakeup_in, False)
    _signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    # Process 1 is safe from every signal it has no handler for, and Python has one for this.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if template["language"] == "python":
        python_runner.prepare()
        try:
            preload.load(template["preload"])  # type: ignore[arg-type]
        except preload.Missing as error:
            _give_up(channel_out, str(error))
    if template.get("image"):
        # Only here: others do not pay for it.
        from . import warm_image

        warm_image.become(channel_in, channel_out)
    template["bounds"] = bounds(template["limits"])  # type: ignore[arg-type]
    # Elsewhere than in process 1 of a namespace /tmp and the like are the host's.
    uid: "int | None" = template["uid"]  # type: ignore[assignment]
    untouched = None
    if os.getpid() == 1:
        # What serves one request only is compared with nothing afterwards.
        untouched = None if template.get("once") else Untouched(os.getcwd(), uid)
        fill_tmp()
    child = _warm_up(template, channel_out)
    is_first = True
    # gVisor lets user code open the files, though not the sockets, that process 1 has open.
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    # A channel that does not end with its host: nobody may come any more.
    alone: "float | None" = template.get("alone_seconds")  # type: ignore[assignment]
    while True:
        if alone is not None and not wire.wait(channel_in, select.POLLIN, alone):
            os._exit(0)
        frame = wire.read_frame(channel_in, wire.Parser(wire.REQUEST_LIMIT))
        if frame is None:
            os._exit(0)
        if frame[0].get("op") == "keep":
            # Only here: a single run does not pay for it.
            from . import keeping

            keeping.keep(template, child, frame[0], wakeup, channel_in, channel_out)
        again = _serve(template, child, frame, wakeup, channel_in, channel_out)
        if untouched is None or not again:
            # The end of a container is much work for an engine. When, is for the host to say.
            wire.wait(channel_in, select.POLLIN, alone)
            os._exit(0)
        del frame
        child.close()
        left = untouched.restore(str(template["program"]))
        if left:
            _give_up(channel_out, left)
        fill_tmp()
        if is_first and template["language"] == "python":
            preload.load_passive()
            is_first = False
        child = _warm_up(template, channel_out)


def _warm_up(template: "dict[str, object]", channel_out: int) -> Child:
    """A child that has rehearsed in an empty workspace; the host is told."""
    uid: "int | None" = template["uid"]  # type: ignore[assignment]
    os.mkdir("artifacts")
    if uid is not None:
        os.chown("artifacts", uid, uid)
    gc.freeze()
    child = Child(template)
    ready = wire.read_frame(child.report, wire.Parser(0))
    if ready is None:
        child.kill_all()
        complaint = os.read(child.stderr, 2000).decode("utf-8", "replace").strip()
        exhausted = child.exit_code == EXHAUSTED
        _give_up(channel_out, f"the runner did not start: {complaint}", exhausted=exhausted)
    wire.write_all(channel_out, wire.pack({"type": "ready", "python": sys.version.split()[0]}, []))
    return child


def _serve(
    template: "dict[str, object]",
    child: Child,
    frame: "tuple[dict[str, object], dict[str, bytes]]",
    wakeup: int,
    channel_in: int,
    channel_out: int,
) -> bool:
    """Carry out one request and answer it. Whether another may follow."""
    request, parts = frame
    again = request.get("again") is True
    began = time.monotonic()
    # Elsewhere than in process 1 of a namespace these places are the machine's.
    places = [os.getcwd(), *PLACES] if os.getpid() == 1 else []
    usage: "int | None" = template.get("usage")  # type: ignore[assignment]
    memory = Memory(places, usage) if template["watch_memory"] else None
    stream = None
    is_followed, has_network = request.get("stream") is True, request.get("network") is True
    if is_followed or has_network:
        # Only here: what nobody follows does not pay for it.
        from .stream import Stream

        stream = Stream(channel_out, request["id"])
    given: "dict[str, str]" = request.get("environment") or {}  # type: ignore[assignment]
    variables = network.complete(given)
    run = Run(
        child,
        request,
        memory,
        advised=bool(template.get("advise")),
        stream=stream if is_followed else None,
        language=str(template["language"]),
        network=stream if has_network else None,
    )
    job = wire.chunks(
        {
            "entrypoint": request["entrypoint"],
            "timeout": request["timeout"],
            "result_bytes": run.limits["result_bytes"],
            "rich_output_bytes": run.limits["rich_output_bytes"],
            "environment": variables,
        },
        list(parts.items()),
    )
    parts.clear()
    run.follow(job, wakeup, channel_in)
    seconds = time.monotonic() - began
    run.finish()
    if stream is not None:
        stream.finish()
    wire.write_all(channel_out, answer(run, request["id"], seconds))
    return again


def _give_up(channel_out: int, reason: str, *, exhausted: bool = False) -> "NoReturn":
    failed = {"type": "failed", "reason": reason[:2000], "exhausted": exhausted}
    wire.write_all(channel_out, wire.pack(failed, []))
    os._exit(70)
