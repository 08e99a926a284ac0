"""In every Python process of a peer's suite: `deepspeed` is zero_deepspeed.

Python imports a module of this name by itself when it starts. The engine is imported only when a
process asks for a library that looks for DeepSpeed, so that other processes start quickly.

The helpers of DeepSpeed's tests import everything that there is. A name that this tree does not
have is a placeholder for them, which fails when it is called, with the words "not here: ". The
tests name devices by their number, which is that of a GPU; here it means the CPU.
"""

import builtins
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

_LIBRARIES = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers")
_import = builtins.__import__


# Numbers and names that the tests calculate with before they ask the engine for anything.
_CONSTANTS = {
    "deepspeed.git_version_info": {
        "version": "0.19.8",
        "torch_info": {"version": "2.13", "cuda_version": "13.0", "nccl_version": "2.29"},
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 2**20},
    "deepspeed.runtime.torch_autocast": {"PARAM_COMM_DTYPE_ATTR_NAME": "comm_dtype"},
}


class _First:
    """Before the first of these libraries is found, installs the name `deepspeed`."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in _LIBRARIES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        import zero_deepspeed.as_deepspeed  # noqa: F401

        sys.meta_path.insert(0, _Missing())
        _number_the_cpu()
        return find_spec(name)


def _number_the_cpu():
    from torch.nn.parallel import DistributedDataParallel

    from zero_deepspeed import comm
    from zero_deepspeed.accelerator import get_accelerator

    make, gather = DistributedDataParallel.__init__, comm.all_gather_into_tensor

    def make_without_numbers(self, module, device_ids=None, output_device=None, **named):
        make(self, module, **named)

    def gather_numbers(output, tensor, *args, **named):  # gloo gathers no scalars
        return gather(output, tensor.reshape(-1) if tensor.dim() == 0 else tensor, *args, **named)

    DistributedDataParallel.__init__ = make_without_numbers
    comm.all_gather_into_tensor = gather_numbers
    type(get_accelerator()).current_device = lambda self: "cpu"


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
        vars(module).update(_CONSTANTS.get(module.__name__, {}))
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


builtins.__import__ = _import_for_tests  # also for the import that finds the first of them
sys.meta_path.insert(0, _First())

# Also in the ranks of a case; multiprocessing's own process of bookkeeping needs none of it.
_everywhere = "" if "resource_tracker" in " ".join(sys.orig_argv) else "PEER_EVERYWHERE"
for _name in os.environ.get(_everywhere, "").split():
    import_module(_name)
