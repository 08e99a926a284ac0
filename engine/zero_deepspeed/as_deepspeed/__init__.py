"""`import zero_deepspeed.as_deepspeed`: libraries that look for DeepSpeed find this engine.

accelerate, transformers' Trainer and similar libraries look for a module `deepspeed` and for the
metadata of a distribution of that name. Importing this package puts a finder before those of Python
that finds both: `deepspeed.x` is the very module `zero_deepspeed.x`. Nothing is installed, and it
ends with the process.

Scripts import it before anything else; `python -m zero_deepspeed.as_deepspeed` runs an unchanged
script.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

import zero_deepspeed
from zero_deepspeed.absent_names import explain_imports

_NAME = "deepspeed"
_OURS = zero_deepspeed.__name__
_TOO_LATE = (_NAME, "accelerate", "transformers.integrations.deepspeed")
"""Modules of DeepSpeed, and those that look for it only when they are imported."""
_AMENDED = {
    "accelerate.accelerator": "zero_deepspeed.as_deepspeed.accelerator",
    "accelerate.utils.launch": "zero_deepspeed.as_deepspeed.launch",
    "transformers.modeling_utils": "zero_deepspeed.as_deepspeed.pretrained",
    "transformers.trainer": "zero_deepspeed.as_deepspeed.trainer",
}
"""Module of a library -> the module that amends it after its import."""
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {zero_deepspeed.__version__}\n"
    "Summary: zero_deepspeed, under the name that libraries look for\n",
    "top_level.txt": f"{_NAME}\n",
}


class _Alias(Loader):
    """Loads a module of ours in the place of DeepSpeed's."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # The very module, not a copy: `isinstance` and module state are one under both names.
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the machinery has just put DeepSpeed's in its place

    def get_code(self, _name: str) -> CodeType | None:
        """The code of the module, for `-m deepspeed.NAME`."""
        spec = find_spec(self._ours)
        loader = spec.loader if spec is not None else None
        return loader.get_code(self._ours) if isinstance(loader, InspectLoader) else None


class _Metadata(Distribution):
    """The metadata that would be in site-packages."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(zero_deepspeed.__path__[0]).parent / str(path)


class _Finder(MetaPathFinder):
    """Finds DeepSpeed's modules and metadata; amends some modules of libraries."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _AMENDED:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def execute_and_install(module: ModuleType) -> None:
                    execute(module)
                    importlib.import_module(_AMENDED[fullname]).install()

                # On this loader alone: its class loads all other modules.
                vars(spec.loader)["exec_module"] = execute_and_install
            return spec
        if fullname.partition(".")[0] != _NAME:
            return None
        ours = find_spec(_OURS + fullname.removeprefix(_NAME))
        if ours is None:
            return None
        package = ours.submodule_search_locations is not None
        return ModuleSpec(fullname, _Alias(ours.name), is_package=package)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        return [_Metadata()] if context.name in (None, _NAME) else []


# A library that has already looked would have half of DeepSpeed and half of this.
if _late := [name for name in _TOO_LATE if name in sys.modules]:
    raise ImportError(
        f"zero_deepspeed.as_deepspeed comes too late: {_late[0]} is imported already; "
        "import it first in the script, or run the script with "
        "python -m zero_deepspeed.as_deepspeed SCRIPT"
    )
sys.meta_path.insert(0, _Finder())
explain_imports(_NAME)
