# SPDX-License-Identifier: LGPL-2.1-or-later
"""What every Python runs that `virt-vgpu exec` starts: it puts the shim into `libvirt`.

Only once a program imports that; others pay for this file alone, which imports nothing. Then the
`sitecustomize` that Python would have found without us has its turn.
"""

import os
import sys

TYPE_CHECKING = False  # as type checkers read it; typing itself would cost every program 10 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Finder:
    """Has the others find `libvirt`, and the shim put into it."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "libvirt":
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                    return spec
        return None


class _Loader:
    """Another loader, after whose work the shim is installed."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "Any") -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _install()


def _install() -> None:
    package = os.path.dirname(_HERE)
    try:
        if "vgpu_libvirt" not in sys.modules:
            _load(package)
        from vgpu_libvirt import shim

        shim.install()
    except Exception as error:  # the program must go on, whatever its Python lacks
        sys.stderr.write(
            f"vgpu-libvirt: no vGPUs for what {sys.executable} starts, since {package} can't be "
            f"used there: {type(error).__name__}: {error}\n"
        )


def _load(package: str) -> None:
    """Import our package from where this file is, without showing the program its neighbours."""
    from importlib import util

    spec = util.spec_from_file_location(
        "vgpu_libvirt", f"{package}/__init__.py", submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["vgpu_libvirt"] = util.module_from_spec(spec)
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder())
# The program sees neither our directory nor this module. Its children get both by PYTHONPATH.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
del sys.modules["sitecustomize"]
# Where there is none, `site` passes over the error.
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401
