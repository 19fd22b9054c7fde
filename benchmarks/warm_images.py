"""What a gVisor sandbox with preloads takes until it is warm: started afresh, and from an image.

In turn, each alone. Processor time is the cgroup's; PSS is of all processes of the sandbox. As
root, without Docker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import django


def pss(pid: int) -> int:
    """KiB of a process and all below it, what is shared counted in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        threads = [each / "children" for each in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(child) for each in threads for child in each.read_text().split()]
    except OSError:  # it has ended
        return 0
    own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return own + sum(pss(child) for child in children)


async def measure(rounds: int, preload: list[str], platform: str) -> None:
    from providers.runtime.launchers.oci import GvisorLauncher
    from providers.runtime.launchers.warm_images import WarmImages
    from providers.runtime.pool.requests import make_template
    from providers.runtime.pool.sandbox import Sandbox
    from providers.values import Job, SandboxLimits

    # To see what an image without modules would bring.
    WarmImages.are_for = staticmethod(lambda _: True)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
        (Path(folder) / "run").mkdir()
        launcher = GvisorLauncher(Path(folder), platform)
        await launcher.prepare()
        images, found = launcher._images, {}
        try:
            limits = SandboxLimits()
            template = make_template("python", "python", launcher, limits, tuple(preload))
            for number in range(rounds + 1):
                for name, way in (("afresh", None), ("from an image", images)):
                    launcher._images = way
                    began = time.perf_counter()
                    sandbox = await Sandbox.start(launcher, template)
                    wall = (time.perf_counter() - began) * 1000
                    guest = sandbox.guest
                    used = (guest.evidence().cpu_seconds or 0.0) * 1000
                    held = pss(guest._process.pid) / 1024  # type: ignore[attr-defined]
                    result = await sandbox.run(Job("print(1)", timeout=30))
                    assert result.stdout == "1\n"
                    await sandbox.destroy()
                    if number:  # the first makes the image
                        found.setdefault(name, []).append((wall, used, held))
        finally:
            launcher.close()
    print(f"preloaded: {' '.join(preload) or 'nothing'}; {rounds} each, {platform}; medians")
    for name, rows in found.items():
        wall, used, held = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<14} {wall:6.0f} ms, {used:6.0f} ms of the processors, {held:6.1f} MiB PSS")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_images", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="counted sandboxes each way (10)")
    parser.add_argument("--preload", nargs="*", default=["numpy", "pandas"])
    parser.add_argument("--platform", default="ptrace")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    asyncio.run(measure(options.rounds, options.preload, options.platform))
    print("load average at the end:", " ".join(f"{each:.1f}" for each in os.getloadavg()))


if __name__ == "__main__":
    main()
