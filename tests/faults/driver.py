# SPDX-License-Identifier: LGPL-2.1-or-later
"""A simulated driver: the sysfs of a host with vGPU-capable GPUs, as a FUSE filesystem.

It keeps the vendor driver's rules, which plain files can't: what it refuses, when it is busy, what
its lists still offer, and that a write takes its time. It runs as a process of its own; tests
talk to it by a `Client`, and read from its log who wrote what when.

One mount serves any number of worlds, a directory each, which share nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
NAME = "vgpu-libvirt-driver"  # of the filesystem, in /proc/mounts

_ROW = re.compile(r"(\d+)\s*:\s*(\S.*)")
_SIZE = re.compile(r"-(\d+)[ABCQ]$")
_HEADER = "ID    : vGPU Name\n"
_DEVICES = "bus/pci/devices"

# What each driver answers; None: it takes the write.
ERRNOS: dict[str, dict[str, int | None]] = {
    "vendor": {
        "set": errno.EPERM,  # a type over a type
        "clear": errno.EPERM,  # nothing over nothing
        "open": errno.EPERM,
        "busy": errno.EBUSY,
        "unknown": errno.EIO,
        "other size": errno.EIO,
        "full": errno.EIO,
    },
    "rfc": {
        "set": None,
        "clear": None,
        "open": errno.EBUSY,
        "busy": errno.EBUSY,
        "unknown": errno.ENODEV,
        "other size": errno.EINVAL,
        "full": errno.ENOSPC,
    },
}

OPTIONS: dict[str, Any] = {
    "errnos": "vendor",
    "own_list": "empty",  # the list of a VF that has a type: "empty", or "kept"
    "header": "always",  # or "never", or "while-unused": until the GPU has its first vGPU
    "open_writes": "refused",  # or "taken": the driver itself stops nobody
    "busy_ms": 0,  # after a close, in which clearing is refused
    "busy": "refuses",  # or "blocks": the write waits that long
    "write_ms": 0,  # how long any write takes
    "memory_mib": 48 * 1024,  # of each GPU
    "max_instances": 0,  # of one type on a GPU; 0: what the memory gives
    "state": "",  # the package's state directory, to see at each write whether a claim stood
}


class Write(NamedTuple):
    """One write to a `current_vgpu_type`, as the log tells it."""

    vf: str
    value: str
    result: str  # "ok", "ignored", or the name of an errno
    before: int  # the type that the VF had
    open: bool  # whether a QEMU had the VF open at any time during the write
    live: bool  # the same for: a living domain had it
    claimed: bool  # whether a claim file stood when the write began
    pid: int


class Vf:
    """One VF, and what stands against writes to it."""

    def __init__(self, world: World, gpu: Gpu, name: str) -> None:
        self.world, self.gpu, self.name = world, gpu, name
        self.type = 0
        self.ours = False  # whether the type came by a write through the filesystem
        self.open = self.live = False
        self.busy_until = 0.0
        self.failures: list[dict[str, Any]] = []
        self.unreadable: set[str] = set()
        self.holding = False  # whether writes wait until they are let go
        self.mutex = threading.Lock()

    def current(self) -> str:
        return f"{self.type}\n"

    def creatable(self) -> str:
        options = self.world.options
        used = any(vf.type for vf in self.gpu.vfs)
        if self.type and options["own_list"] == "empty":
            rows = []
        else:
            rows = [f"{i:<5} : {name}\n" for i, name in self.gpu.types.items() if self.fits(i)]
        header = options["header"] == "always" or (options["header"] == "while-unused" and not used)
        return (_HEADER if header else "") + "".join(rows)

    def fits(self, type_id: int) -> bool:
        return self.refusal_of(type_id) is None

    def refusal_of(self, type_id: int) -> str | None:
        """Why the GPU has no room for one more of this type."""
        gpu = self.gpu
        if type_id not in gpu.types:
            return "unknown"
        others = [vf.type for vf in gpu.vfs if vf.type and vf is not self]
        sizes = [gpu.size(other) for other in others]
        if sizes and gpu.size(type_id) != sizes[0]:
            return "other size"
        limit = self.world.options["max_instances"]
        full = sum(sizes) + gpu.size(type_id) > self.world.options["memory_mib"]
        return "full" if full or (limit and others.count(type_id) >= limit) else None


class Gpu:
    """A PF with its VFs."""

    def __init__(self, lists: str, node: int) -> None:
        self.types = {int(row[1]): row[2].strip() for row in _ROW.finditer(lists)}
        self.node = node
        self.vfs: list[Vf] = []

    def size(self, type_id: int) -> int:
        match = _SIZE.search(self.types.get(type_id, ""))
        return int(match[1]) * 1024 if match else 0


class World:
    """One host's GPUs, and the filesystem nodes that show them, by path."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.options = dict(OPTIONS)
        self.vfs: dict[str, Vf] = {}
        self.log: list[Write] = []
        self.changed = threading.Condition()
        self.waiting = 0  # writes that the test holds back
        # path -> names in a directory, target of a link, or a function that reads an attribute
        self.nodes: dict[str, Any] = {f"/{name}": []}
        self.add_directory(f"{_DEVICES}")

    def add_directory(self, path: str) -> None:
        parent = f"/{self.name}"
        for part in path.split("/"):
            self.add(parent, part, [])
            parent += f"/{part}"

    def add(self, parent: str, name: str, node: Any) -> None:
        if f"{parent}/{name}" not in self.nodes:
            self.nodes[parent].append(name)
            self.nodes[f"{parent}/{name}"] = node

    def add_gpu(
        self, address: str, vfs: dict[str, int], lists: str, node: int, first_type: int = 0
    ) -> None:
        """Add a GPU; VFS: address -> number of the IOMMU group."""
        gpu = Gpu(lists, node)
        devices = f"/{self.name}/{_DEVICES}"
        pf = f"{devices}/{address}"
        self.add_directory(f"{_DEVICES}/{address}")
        self.add(pf, "numa_node", lambda: f"{gpu.node}\n")
        for number, (name, group) in enumerate(vfs.items()):
            vf = self.vfs[name] = Vf(self, gpu, name)
            gpu.vfs.append(vf)
            here = f"{devices}/{name}"
            self.add_directory(f"{_DEVICES}/{name}/nvidia")
            self.add_directory(f"{_DEVICES}/{name}/vfio-dev/vfio{group + 7}")
            self.add(here, "physfn", f"../{address}")
            self.add(here, "iommu_group", f"../../kernel/iommu_groups/{group}")
            self.add(pf, f"virtfn{number}", f"../{name}")
            self.add(f"{here}/nvidia", "creatable_vgpu_types", (vf, "creatable"))
            self.add(f"{here}/nvidia", "current_vgpu_type", (vf, "current"))

    # --- what a write does ---

    def write(self, vf: Vf, value: str, pid: int) -> None:
        """Take one write, or raise OSError; it is in the log either way."""
        with vf.mutex:
            claimed = os.path.lexists(f"{self.options['state']}/claims/{vf.name}.json")
            seen = [vf.open, vf.live]
            before = vf.type
            self._take_time(vf)
            if self.options["busy"] == "blocks":
                time.sleep(max(0.0, vf.busy_until - time.monotonic()) if before else 0.0)
            result = self._apply(vf, value)
            seen = [seen[0] or vf.open, seen[1] or vf.live]
            self.log.append(Write(vf.name, value, result, before, *seen, claimed, pid))
        if result not in ("ok", "ignored"):
            raise OSError(getattr(errno, result), result)

    def _take_time(self, vf: Vf) -> None:
        time.sleep(self.options["write_ms"] / 1000)
        with self.changed:
            self.waiting += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not vf.holding)
            self.waiting -= 1

    def _apply(self, vf: Vf, value: str) -> str:
        if not re.fullmatch(r"\d{1,10}\n?", value, re.ASCII):
            return "EINVAL"
        wanted = int(value)
        for failure in vf.failures:
            if failure["times"] and failure["value"] in (None, wanted):
                failure["times"] -= 1
                if failure["result"] != "ignored":
                    return str(failure["result"])
                vf.type = 0  # as a driver that drops what it doesn't know
                return "ignored"
        refusal = self._refusal(vf, wanted)
        if refusal and (code := ERRNOS[self.options["errnos"]][refusal]):
            return errno.errorcode[code]
        vf.type, vf.ours = wanted, True
        return "ok"

    def _refusal(self, vf: Vf, wanted: int) -> str | None:
        if vf.open and self.options["open_writes"] == "refused":
            return "open"
        if wanted == 0:
            if vf.type and time.monotonic() < vf.busy_until:
                return "busy"
            return None if vf.type else "clear"
        if vf.type and ERRNOS[self.options["errnos"]]["set"]:
            return "set"
        return vf.refusal_of(wanted)


class Control:
    """What tests may ask for; each public method is a command of the socket."""

    def __init__(self) -> None:
        self.worlds: dict[str, World] = {}

    def ping(self) -> int:
        return os.getpid()

    def make(self, world: str) -> None:
        self.worlds[world] = World(world)

    def drop(self, world: str) -> None:
        self.worlds.pop(world, None)

    def add_gpu(self, world: str, address: str, vfs: dict[str, int], lists: str, node: int) -> None:
        self.worlds[world].add_gpu(address, vfs, lists, node)

    def set(self, world: str, options: dict[str, Any]) -> None:
        assert options.keys() <= OPTIONS.keys(), options
        self.worlds[world].options.update(options)

    def types(self, world: str) -> dict[str, list[Any]]:
        """For each VF its type, and whether that came through the filesystem."""
        return {name: [vf.type, vf.ours] for name, vf in self.worlds[world].vfs.items()}

    def set_type(self, world: str, vf: str, type_id: int) -> None:
        """Set a type behind everybody's back."""
        self.worlds[world].vfs[vf].type = type_id
        self.worlds[world].vfs[vf].ours = False

    def reset(self, world: str) -> None:
        """Power cycle the GPUs: no types, nothing open, nothing held."""
        for vf in self.worlds[world].vfs.values():
            vf.type, vf.ours, vf.open, vf.live, vf.busy_until = 0, False, False, False, 0.0

    def use(self, world: str, vfs: list[str], is_open: bool, live: bool) -> None:
        """A domain that lives has VFS, and its QEMU has them open; or both end."""
        for name in vfs:
            vf = self.worlds[world].vfs[name]
            if vf.open and not is_open:
                vf.busy_until = time.monotonic() + self.worlds[world].options["busy_ms"] / 1000
            vf.open, vf.live = is_open, live

    def fail(
        self, world: str, vf: str, result: str, times: int = 1, value: int | None = None
    ) -> None:
        """Refuse the next TIMES writes (of VALUE) with an errno's name, or take and ignore them."""
        failure = {"result": result, "times": times, "value": value}
        self.worlds[world].vfs[vf].failures.append(failure)

    def hide(self, world: str, vf: str, attribute: str, hidden: bool) -> None:
        """Make reading an attribute ("current" or "creatable") fail with EIO, or work again."""
        unreadable = self.worlds[world].vfs[vf].unreadable
        (unreadable.add if hidden else unreadable.discard)(attribute)

    def hold(self, world: str, vf: str, held: bool) -> None:
        """Let writes to VF stand still inside the driver, or go on."""
        where = self.worlds[world]
        with where.changed:
            where.vfs[vf].holding = held
            where.changed.notify_all()

    def wait_for_writer(self, world: str, timeout: float = 10.0) -> bool:
        """Wait until a write stands still inside the driver."""
        where = self.worlds[world]
        with where.changed:
            return where.changed.wait_for(lambda: where.waiting, timeout) > 0

    def log(self, world: str) -> list[Write]:
        return self.worlds[world].log


def serve_control(control: Control, path: str) -> None:
    """Answer JSON lines on a Unix socket, a thread a connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                command, arguments = json.loads(line)
                try:
                    reply = {"result": getattr(control, command)(**arguments)}
                except Exception as error:
                    reply = {"error": f"{type(error).__name__}: {error}"}
                lines.write(json.dumps(reply) + "\n")
                lines.flush()

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def mount(directory: str, control: Control) -> None:
    """Serve the filesystem until it is unmounted."""
    import mfusepy

    class Filesystem(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def _node(self, path: str) -> Any:
            world = control.worlds.get(path.split("/", 2)[1])
            node = world.nodes.get(path) if world else None
            if node is None:
                raise OSError(errno.ENOENT, path)
            return node

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            node = [] if path == "/" else self._node(path)
            if isinstance(node, list):
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if isinstance(node, str):
                return {"st_mode": stat.S_IFLNK | 0o777, "st_nlink": 1, "st_size": len(node)}
            return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": 4096}

        def readdir(self, path: str, fh: int) -> Any:
            return [".", "..", *(list(control.worlds) if path == "/" else self._node(path))]

        def readlink(self, path: str) -> str:
            return str(self._node(path))

        def open(self, path: str, flags: int) -> int:
            self._node(path)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            node = self._node(path)
            if isinstance(node, tuple):
                vf, attribute = node
                if attribute in vf.unreadable:
                    raise OSError(errno.EIO, path)
                text = getattr(vf, attribute)()
            else:
                text = node()
            return bytes(text.encode()[offset : offset + size])

        def truncate(self, path: str, length: int, fh: Any = None) -> int:
            return 0  # sysfs lets it pass

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            node = self._node(path)
            if not isinstance(node, tuple) or node[1] != "current":
                raise OSError(errno.EACCES, path)
            pid = mfusepy.fuse_get_context()[2]
            node[0].world.write(node[0], data.decode(errors="replace"), pid)
            return len(data)

    mfusepy.FUSE(
        Filesystem(),
        directory,
        foreground=True,
        fsname=f"{NAME}:{os.getppid()}",
        direct_io=True,
        entry_timeout=3600,  # worlds grow, but nothing in them ever becomes something else
        attr_timeout=3600,
    )


def unmount(directory: str | Path) -> None:
    """Take a mount away, whoever still looks at it."""
    subprocess.run(["umount", "--lazy", str(directory)], capture_output=True, check=False)


def unmount_orphans() -> None:
    """Take away what runs that were killed left mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        source, directory, *_ = line.split()
        name, _, pid = source.partition(":")
        if name == NAME and not Path("/proc", pid).exists():
            unmount(directory)


def main() -> None:
    """`driver.py MOUNT SOCKET`: serve until the mount, or whoever has our stdin, is gone."""
    directory, path = sys.argv[1:]
    control = Control()
    threading.Thread(target=serve_control, args=(control, path), daemon=True).start()

    def end_with_the_tests() -> None:
        sys.stdin.read()
        unmount(directory)
        os._exit(0)

    threading.Thread(target=end_with_the_tests, daemon=True).start()
    mount(directory, control)


class Client:
    """A connection to a running driver; one process's own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mount = directory / "mount"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(directory / "control"))
        self._lines = self._socket.makefile("rw")

    def call(self, command: str, **arguments: Any) -> Any:
        """Have one method of `Control` called."""
        self._lines.write(json.dumps([command, arguments]) + "\n")
        self._lines.flush()
        reply = json.loads(self._lines.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def log(self, world: str) -> list[Write]:
        """Every write to a VF of WORLD, in order."""
        return [Write(*entry) for entry in self.call("log", world=world)]

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Client]:
    """A driver that serves DIRECTORY/mount for a while, and a connection to it."""
    mount = directory / "mount"
    mount.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.driver", str(mount), str(directory / "control")],
        stdin=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        end = time.monotonic() + 30
        while not ((directory / "control").exists() and os.path.ismount(mount)):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the simulated driver didn't come up")
            time.sleep(0.02)
        with contextlib.closing(Client(directory)) as client:
            yield client
    finally:
        unmount(mount)
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
