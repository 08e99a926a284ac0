"""In every Python process of a peer's suite: `deepspeed` is zero_deepspeed.

Python imports a module of this name by itself when it starts. The engine is imported only when a
process asks for a library that looks for DeepSpeed, so that other processes start quickly.

The helpers of DeepSpeed's tests import everything that there is. A name that this tree does not
have is a placeholder for them, which fails when it is called, with the words "not here: ".
"""

import builtins
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

_LIBRARIES = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers")
_import = builtins.__import__


class _First:
    """Before the first of these libraries is found, installs the name `deepspeed`."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in _LIBRARIES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        import zero_deepspeed.as_deepspeed  # noqa: F401

        sys.meta_path.insert(0, _Missing())
        builtins.__import__ = _import_for_tests
        return find_spec(name)


class _Missing:
    """Finds placeholders for modules of DeepSpeed that are missing, if a test imports them."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("deepspeed.") or not _asked_by_a_test():
            return None
        try:
            missing = find_spec("zero_" + name) is None
        except ModuleNotFoundError:
            missing = True
        return ModuleSpec(name, self, is_package=True) if missing else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: _placeholder(f"{module.__name__}.{name}")


class _Placeholder(type):
    def __call__(cls, *args, **named):
        raise NotImplementedError(f"not here: {cls.what}")

    def __getattr__(cls, name):
        if name.startswith("__") or name == "what":
            raise AttributeError(name)
        return _placeholder(f"{cls.what}.{name}")


def _placeholder(what):
    if what.rpartition(".")[2].startswith("__"):
        raise AttributeError(what)
    return _Placeholder(what.rpartition(".")[2], (), {"what": what})


def _asked_by_a_test():
    """Whether an import comes from a file of the tests, and not from this tree or a library."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_of_tests(frame.f_globals):
            return True
        if frame.f_globals.get("__name__", "").startswith("zero_"):
            return False
        frame = frame.f_back
    return False


def _is_of_tests(names):
    return "/tests/unit/" in (names.get("__file__") or "")


def _import_for_tests(name, globals=None, locals=None, fromlist=(), level=0):
    module = _import(name, globals, locals, fromlist, level)
    if _is_of_tests(globals or {}) and name.partition(".")[0] == "deepspeed":
        for each in fromlist or ():
            try:
                getattr(module, each)
            except AttributeError:
                setattr(module, each, _placeholder(f"{name}.{each}"))
    return module


sys.meta_path.insert(0, _First())
