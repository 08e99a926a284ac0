"""The page of the API: the public names of the libraries, with signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from docs.writing import attribute_docs, page, sentence, table

LIBRARIES = (
    "zero_engine",
    "zero_torch",
    "zero_step",
    "zero_checkpoint",
    "zero_data",
    "zero_comm",
    "zero_agent",
)
"""Those whose API is for scripts, beside zero_deepspeed, whose names are DeepSpeed's."""
_API = """# API

What a script may use of the libraries. `zero_deepspeed` has DeepSpeed's names
([what differs](deepspeed.md)): {names}.
"""
_WIDTH = 80
"""Characters of a signature up to which a page shows it on one line."""
_SECTION = re.compile(r"((?:Args|Returns|Raises|Yields)(?: \(.*\))?):")


def api() -> str:
    """The public names of the libraries, with their signatures and docstrings."""
    deepspeed = importlib.import_module("zero_deepspeed")
    names = ", ".join(f"`{name}`" for name in deepspeed.__all__)
    lines = [_API.format(names=names).rstrip()]
    for library in LIBRARIES:
        module = importlib.import_module(library)
        lines += [f"\n## {library}\n", *_text(module)]
        if hasattr(module, "__all__"):
            lines += [line for name in module.__all__ for line in _name(module, name)]
        else:
            lines += ["", *table(("module", "what it is for"), _modules(module))]
    return page(*lines)


def _modules(package: ModuleType) -> Iterator[Sequence[str]]:
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        text = (module.__doc__ or "").strip().partition("\n\n")[0]
        yield f"`{module.__name__}`", sentence(text)
        if info.ispkg:
            yield from _modules(module)


def _name(module: ModuleType, name: str) -> Iterator[str]:
    thing = getattr(module, name)
    yield f"\n### {module.__name__}.{name}\n"
    if not inspect.isclass(thing):
        yield from _function(thing, f"{module.__name__}.")
        return
    ours = name == "Engine"  # `initialize` makes it
    if "__init__" in vars(thing) and not (ours or dataclasses.is_dataclass(thing)):
        yield from _signature(thing.__init__, name)
    yield from _text(thing)
    docs = attribute_docs(thing) if dataclasses.is_dataclass(thing) else {}
    if dataclasses.is_dataclass(thing):
        yield ""
        for field in dataclasses.fields(thing):
            yield f"- `{field.name}: {field.type}` {docs.get(field.name, '')}".rstrip()
    yield from _members(thing)


def _members(kind: type[Any]) -> Iterator[str]:
    """Its public methods and properties, those of its bases in this project among them."""
    for name in sorted(dir(kind)):
        found = inspect.getattr_static(kind, name)
        owner = next(it for it in kind.__mro__ if name in vars(it))
        if name.startswith("_") or not owner.__module__.startswith("zero_"):
            continue
        if isinstance(found, property) and found.fget is not None:
            returns = _definition(found.fget).returns
            yield f"\n#### {kind.__name__}.{name}\n"
            yield f"```python\n{name}: {ast.unparse(returns) if returns else ''}\n```\n"
            yield from _text(found.fget)
        elif callable(thing := getattr(found, "__func__", found)):
            yield f"\n#### {kind.__name__}.{name}\n"
            yield from _function(thing, "")


def _function(thing: Callable[..., Any], prefix: str) -> Iterator[str]:
    yield from _signature(thing, f"{prefix}{thing.__name__}")
    yield from _text(thing)


def _definition(thing: Callable[..., Any]) -> ast.FunctionDef:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    found = ast.parse(source).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def _signature(thing: Callable[..., Any], name: str) -> Iterator[str]:
    """As it is written, whatever this version of Python makes of annotations."""
    definition = _definition(thing)
    arguments = [word for word in _arguments(definition.args) if word not in ("self", "cls")]
    text = ast.unparse(definition.returns) if definition.returns else "None"
    returns = f" -> {text}" if text != "None" else ""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > _WIDTH:
        inner = "\n".join(f"    {word}," for word in arguments)
        line = f"{name}(\n{inner}\n){returns}"
    yield f"```python\n{line}\n```\n"


def _arguments(found: ast.arguments) -> Iterator[str]:
    def word(argument: ast.arg, default: ast.expr | None) -> str:
        equals = " = " if argument.annotation else "="
        return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default else "")

    plain = [*found.posonlyargs, *found.args]
    defaults = [*[None] * (len(plain) - len(found.defaults)), *found.defaults]
    yield from map(word, plain, defaults)
    if found.vararg or found.kwonlyargs:
        yield f"*{ast.unparse(found.vararg) if found.vararg else ''}"
    yield from map(word, found.kwonlyargs, found.kw_defaults)
    if found.kwarg:
        yield f"**{ast.unparse(found.kwarg)}"


def _text(thing: object) -> Iterator[str]:
    """A docstring; its sections become lists."""
    listing = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if header := _SECTION.fullmatch(line):
            listing = True
            yield f"**{header[1]}**\n"
        elif listing and re.match(r" {4}\S", line):
            term, colon, text = line.strip().partition(": ")
            yield f"- `{term}`: {text}" if colon and " " not in term else f"- {line.strip()}"
        elif listing:
            yield line.removeprefix("      ")
        else:
            yield line
    yield ""
