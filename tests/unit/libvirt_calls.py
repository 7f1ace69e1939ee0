# SPDX-License-Identifier: LGPL-2.1-or-later
"""Calls libvirt's test driver in a random order and prints all that a program can see of it.

`python -m tests.unit.libvirt_calls HOW SEEDS`: HOW is how to come by a connection.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from typing import Any

import libvirt

URI = "test:///default"
NAMES = ("test", "a", "b", "c")
_LENGTH = 40
_CREATION_TIME = re.compile(r"<creationTime>\d+</creationTime>")


def uuid_of(name: str) -> str:
    return f"aaaaaaaa-0000-0000-0000-00000000000{NAMES.index(name)}"


def document(name: str, memory: int = 65536) -> str:
    return (
        f"<domain type='test'><name>{name}</name><uuid>{uuid_of(name)}</uuid>"
        f"<metadata><x:y xmlns:x='urn:vgpu-libvirt:domain:2'/></metadata><memory>{memory}</memory>"
        "<os><type>hvm</type></os><devices><hostdev mode='subsystem' type='pci' managed='no'>"
        "<source><address domain='0' bus='1' slot='2' function='3'/></source></hostdev></devices>"
        "</domain>"
    )


def seen(value: Any) -> Any:
    """VALUE without what differs from one run to the next."""
    if isinstance(value, libvirt.virDomain):
        return ["domain", type(value).__name__, value.name(), sorted(vars(value))]
    if isinstance(value, libvirt.virDomainSnapshot):
        return ["snapshot", value.getName()]
    if isinstance(value, libvirt.virConnect):
        return ["connection", type(value).__name__, sorted(vars(value))]
    if isinstance(value, list):  # libvirt's hash tables give another order in each process
        return sorted(map(seen, value), key=json.dumps)
    if isinstance(value, tuple):
        return [seen(each) for each in value]
    if isinstance(value, BaseException):
        return [type(value).__name__, value.args, getattr(value, "err", None)]
    return _CREATION_TIME.sub("", str(value))


class Caller:
    """Calls at random, on whatever handles it has got by then."""

    def __init__(self, connection: Any, seed: int) -> None:
        self.connection = connection
        self.random = random.Random(seed)
        self.domains: list[Any] = [connection.lookupByName("test")]
        self.snapshots: list[Any] = []
        self.log: list[Any] = []

    def call(self, owner: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            result = getattr(owner, name)(*arguments, **keywords)
        except Exception as error:
            self.log.append([name, "raises", seen(error)])
            return None
        self.log.append([name, seen(result)])
        found = result if isinstance(result, list) else [result]
        for one in sorted(found, key=lambda each: json.dumps(seen(each))):
            if isinstance(one, libvirt.virDomain):
                self.domains.append(one)
            if isinstance(one, libvirt.virDomainSnapshot):
                self.snapshots.append(one)
        return result

    def run(self) -> list[Any]:
        for _ in range(_LENGTH):
            self.random.choice(
                [self.on_connection, self.on_domain, self.on_domain, self.wrong, self.on_snapshot]
            )()
        for domain in sorted(self.connection.listAllDomains(), key=lambda each: each.name()):
            self.call(domain, "XMLDesc")
            self.call(domain, "state")
        return self.log

    def on_connection(self) -> None:
        name = self.random.choice(NAMES)
        text = document(name, self.random.choice([65536, 131072]))
        flags = self.random.choice([0, 0, libvirt.VIR_DOMAIN_START_PAUSED])
        connection = self.connection
        self.random.choice(
            [
                lambda: self.call(connection, "defineXML", text),
                lambda: self.call(connection, "defineXML", xml=text),
                lambda: self.call(connection, "defineXMLFlags", text, flags=0),
                lambda: self.call(connection, "createXML", text, flags),
                lambda: self.call(connection, "createXML", flags=flags, xmlDesc=text),
                lambda: self.call(connection, "createLinux", text),
                lambda: self.call(connection, "createXMLWithFiles", text, [0], flags),
                lambda: self.call(connection, "lookupByName", name),
                lambda: self.call(connection, "lookupByID", self.random.randrange(1, 5)),
                lambda: self.call(connection, "lookupByUUIDString", uuid_of(name)),
                lambda: self.call(connection, "listAllDomains", self.random.randrange(4)),
                lambda: self.call(connection, "listDomainsID"),
                lambda: self.call(connection, "listDefinedDomains"),
                lambda: self.call(connection, "getAllDomainStats"),
                lambda: self.call(connection, "getURI"),
            ]
        )()

    def on_domain(self) -> None:
        domain = self.random.choice(self.domains)
        flags = self.random.choice([0, 1, 2, 3])
        device = "<disk type='file'><target dev='vda'/></disk>"
        snapshot = "<domainsnapshot><name>s</name></domainsnapshot>"
        self.random.choice(
            [
                lambda: self.call(domain, "create"),
                lambda: self.call(domain, "create"),
                lambda: self.call(domain, "createWithFlags", flags),
                lambda: self.call(domain, "createWithFlags", flags=flags),
                lambda: self.call(domain, "createWithFiles", [0], flags),
                lambda: self.call(domain, "destroy"),
                lambda: self.call(domain, "destroyFlags", flags),
                lambda: self.call(domain, "undefine"),
                lambda: self.call(domain, "suspend"),
                lambda: self.call(domain, "resume"),
                lambda: self.call(domain, "shutdown"),
                lambda: self.call(domain, "managedSave"),
                lambda: self.call(domain, "hasManagedSaveImage"),
                lambda: self.call(domain, "setMetadata", 0, "said", None, None, flags),
                lambda: self.call(domain, "setMetadata", 2, "<a/>", "x", "urn:x", flags),
                lambda: self.call(domain, "metadata", 2, "urn:x", flags),
                lambda: self.call(domain, "XMLDesc", flags),
                lambda: self.call(domain, "isActive"),
                lambda: self.call(domain, "connect"),
                lambda: self.call(domain, "maxMemory"),
                lambda: self.call(domain, "attachDevice", device),
                lambda: self.call(domain, "attachDeviceFlags", device, flags),
                lambda: self.call(domain, "detachDeviceFlags", xml=device, flags=flags),
                lambda: self.call(domain, "detachDeviceAlias", "ua-x", flags),
                lambda: self.call(domain, "migrate3", self.connection, {}),
                lambda: self.call(domain, "snapshotCreateXML", snapshot),
                lambda: self.call(domain, "snapshotListNames"),
                lambda: self.call(domain, "listAllSnapshots"),
            ]
        )()

    def on_snapshot(self) -> None:
        if not self.snapshots:
            return
        snapshot = self.random.choice(self.snapshots)
        domain = self.call(snapshot, "getDomain")
        if domain is not None:
            self.call(domain, self.random.choice(["create", "destroy", "isActive"]))
            self.call(domain, "revertToSnapshot", snapshot)

    def wrong(self) -> None:
        domain, connection = self.random.choice(self.domains), self.connection
        self.random.choice(
            [
                lambda: self.call(connection, "defineXML", "<domain>"),
                lambda: self.call(connection, "defineXML"),
                lambda: self.call(connection, "defineXML", None),
                lambda: self.call(connection, "defineXML", b"<domain/>"),
                lambda: self.call(connection, "createXML", "<domain type='test'/>"),
                lambda: self.call(connection, "createXML", 5, "x"),
                lambda: self.call(connection, "createXML", "urn:vgpu-libvirt:domain:1"),
                lambda: self.call(connection, "createXML", document("a"), nosuch=1),
                lambda: self.call(connection, "createXML", document("a"), flags="x"),
                lambda: self.call(libvirt.virConnect, "defineXML", document("a")),
                lambda: self.call(libvirt.virDomain, "create"),
                lambda: self.call(libvirt.virDomain, "create", None),
                lambda: self.call(domain, "create", 1),
                lambda: self.call(domain, "createWithFlags", 1 << 40),
                lambda: self.call(domain, "attachDeviceFlags", 5),
                lambda: self.call(domain, "migrate3"),
            ]
        )()


def shape() -> dict[str, Any]:
    """What inspection shows of the module."""
    found: dict[str, Any] = {"module": sorted(dir(libvirt)), "bases": libvirt.virDomain.__mro__}
    owners = {"": libvirt, "virConnect.": libvirt.virConnect, "virDomain.": libvirt.virDomain}
    for prefix, owner in owners.items():
        for name, value in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("__"):
                kind = type(value).__name__
                marks = [getattr(value, f"__{key}__", None) for key in ("name", "doc", "module")]
                where = getattr(value, "__qualname__", None)
                found[prefix + name] = [kind, str(inspect.signature(value)), where, *marks]
    return json.loads(json.dumps(found, default=str))


def main(how: str, seeds: int) -> None:
    errors: list[Any] = []
    if how == "shim":
        from vgpu_libvirt import shim

        connect = shim.connect
    else:
        connect = libvirt.open
    libvirt.registerErrorHandler(lambda _, error: errors.append(list(error)), None)
    logs = []
    for seed in range(seeds):
        connection = connect(URI)
        assert type(connection) is libvirt.virConnect
        logs.append(Caller(connection, seed).run())
        connection.close()
    shown = {"shape": shape(), "logs": logs, "errors": errors}
    json.dump(shown, sys.stdout, default=seen)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
