# SPDX-License-Identifier: LGPL-2.1-or-later
"""A simulated driver: the sysfs of a host with vGPU-capable GPUs, as a FUSE filesystem.

It keeps the drivers' rules (gpus.py, mediated.py), which plain files can't: what they refuse, when
they are busy, what their lists still offer, and that a write takes its time. It runs as a process
of its own; tests talk to it by a `Client`, and read from its log who wrote what when.

One mount serves any number of worlds, a directory each, which share nothing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tests.faults.gpus import OPTIONS, Attribute, World, Write

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
NAME = "vgpu-libvirt-driver"  # of the filesystem, in /proc/mounts


class Control:
    """What tests may ask for; each public method is a command of the socket."""

    def __init__(self, mount: str) -> None:
        self.mount = mount
        self.worlds: dict[str, World] = {}

    def ping(self) -> int:
        return os.getpid()

    def make(self, world: str) -> None:
        self.worlds[world] = World(world, self.mount)

    def drop(self, world: str) -> None:
        self.worlds.pop(world, None)

    def add_gpu(
        self, world: str, address: str, vfs: dict[str, int], lists: str, node: int, is_mdev: bool
    ) -> None:
        self.worlds[world].add_gpu(address, vfs, lists, node, is_mdev)

    def set(self, world: str, options: dict[str, Any]) -> None:
        assert options.keys() <= OPTIONS.keys(), options
        self.worlds[world].options.update(options)

    def types(self, world: str) -> dict[str, list[Any]]:
        """For each device its type, and whether that came through the filesystem."""
        devices = list(self.worlds[world].devices.items())
        return {name: [device.type, device.ours] for name, device in devices}

    def set_type(self, world: str, device: str, type_id: int) -> None:
        """Set a type behind everybody's back."""
        where = self.worlds[world]
        with where.rules:
            where.device(device).set(type_id)
            where.device(device).ours = False

    def disown(self, world: str, device: str) -> None:
        """Let the type of DEVICE be one that came behind everybody's back."""
        self.worlds[world].device(device).ours = False

    def reset(self, world: str) -> None:
        """Power cycle the GPUs: no types, nothing open, nothing held."""
        self.worlds[world].reset()

    def use(self, world: str, devices: list[str], is_open: bool, live: bool) -> None:
        """A domain that lives has DEVICES, and its QEMU has them open; or both end."""
        for device in map(self.worlds[world].device, devices):
            was_open, device.open, device.live = device.open, is_open, live
            if was_open and not is_open:
                device.close()

    def fail(
        self, world: str, device: str, result: str, times: int = 1, value: int | None = None
    ) -> None:
        """Refuse the next TIMES writes (of VALUE) with an errno's name, or take and ignore them."""
        failure = {"result": result, "times": times, "value": value}
        self.worlds[world].device(device).failures.append(failure)

    def hide(self, world: str, path: str, hidden: bool) -> None:
        """Make reading a file or link fail with EIO, or work again."""
        unreadable = self.worlds[world].unreadable
        (unreadable.add if hidden else unreadable.discard)(f"/{world}/{path}")

    def hold(self, world: str, device: str, held: bool) -> None:
        """Let writes to DEVICE stand still inside the driver, or go on."""
        where = self.worlds[world]
        with where.changed:
            where.device(device).holding = held
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
        # Whoever reads or writes an open file holds no path, so that a device may go meanwhile.
        flag_nopath = flag_nullpath_ok = 1

        def __init__(self) -> None:
            self.opened: dict[int, str] = {}
            self.numbers = itertools.count(1)

        def _node(self, path: str) -> Any:
            world = control.worlds.get(path.split("/", 2)[1])
            node = world.nodes.get(path) if world else None
            if node is None:
                raise OSError(errno.ENOENT, path)
            return node

        def _readable(self, path: str) -> Any:
            world = control.worlds.get(path.split("/", 2)[1])
            if world and path in world.unreadable:
                raise OSError(errno.EIO, path)
            return self._node(path)

        def _attribute(self, fh: int) -> Attribute:
            try:
                return cast("Attribute", self._readable(self.opened[fh]))
            except FileNotFoundError as error:
                raise OSError(errno.ENODEV, "its device went") from error

        def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
            path = path or self.opened[fh or 0]
            node = [] if path == "/" else self._node(path)
            if isinstance(node, list):
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if isinstance(node, str):
                return {"st_mode": stat.S_IFLNK | 0o777, "st_nlink": 1, "st_size": len(node)}
            return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": 4096}

        def readlink(self, path: str) -> str:
            return str(self._readable(path))

        def open(self, path: str, flags: int = 0) -> int:
            if path != "/":
                self._node(path)
            fh = next(self.numbers)
            self.opened[fh] = path
            return fh

        def opendir(self, path: str) -> int:
            return self.open(path)

        def release(self, path: str | None, fh: int) -> int:
            del self.opened[fh]
            return 0

        releasedir = release

        def readdir(self, path: str | None, fh: int) -> Any:
            where = self.opened[fh]
            return [".", "..", *(control.worlds if where == "/" else self._node(where))]

        def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
            return self._attribute(fh).read().encode()[offset : offset + size]

        def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
            return 0  # sysfs lets it pass

        def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
            attribute = self._attribute(fh)
            if attribute.write is None:
                raise OSError(errno.EACCES, path)
            attribute.write(data.decode(errors="replace"), mfusepy.fuse_get_context()[2])
            return len(data)

        def rmdir(self, path: str) -> int:
            """Let the kernel forget a device; only a world asks for that."""
            control.worlds[path.split("/", 2)[1]].forget(path)
            return 0

        unlink = rmdir

    mfusepy.FUSE(
        Filesystem(),
        directory,
        foreground=True,
        fsname=f"{NAME}:{os.getppid()}",
        direct_io=True,
        entry_timeout=3600,  # worlds grow, and what goes from them goes by way of the kernel
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
    control = Control(directory)
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
        """Every write to a device of WORLD, in order."""
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
