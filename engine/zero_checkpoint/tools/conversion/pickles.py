"""torch files of others, read without running what they contain.

A pickle is a program. torch's own reader of tensors and plain values runs none; the few classes
that DeepSpeed puts beside them are replaced by inert records. All else is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from zero_checkpoint.errors import CheckpointError


class Inert:
    """Stands in for a class of the writer: takes the attributes and does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


def load_torch(
    source: Path | IO[bytes], what: str, *, allow_pickle: bool, inert: tuple[str, ...] = ()
) -> Any:
    """The content of a file made by `torch.save`, on the CPU; tensors of a path are mapped.

    Classes of the full names `inert` become `Inert`. With `allow_pickle` the pickle is run, so its
    authors must be trusted.

    Raises:
        CheckpointError: The file was not made by `torch.save`, or holds more than tensors and
            plain values.
    """
    stand_ins = [(Inert, name) for name in inert]
    try:
        if allow_pickle:
            return torch.load(source, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
            # torch before 1.6 wrote no archive, and only an archive can be mapped.
            mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise CheckpointError(f"{what}: there is no such file") from None
    except IsADirectoryError:
        raise CheckpointError(f"{what}: this is a directory; give the file of torch.save") from None
    except pickle.UnpicklingError as error:
        _, asks, name = str(error).partition("Unsupported global: GLOBAL ")
        if asks:
            raise CheckpointError(
                f"{what}: its pickle asks for {name.split()[0]}, and would run code of its author; "
                "add --allow-pickle if you trust the author"
            ) from error
        # torch's message begins with the advice to run the pickle; the cause comes after it.
        found = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        raise CheckpointError(_unreadable(what, found.splitlines()[0])) from error
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{what}: its pickle needs the module {error.name!r}; install it, or leave out "
            "--allow-pickle"
        ) from error
    except OSError:  # of this machine, which has said nothing of the content
        raise
    except Exception as error:  # bytes that are no pickle fail in whatever way they happen to
        raise CheckpointError(_unreadable(what, _first_line(error))) from error


def _unreadable(what: str, problem: str) -> str:
    return f"{what}: torch cannot read it: {problem}; is it a file of torch.save?"


def _first_line(error: Exception) -> str:
    """The first line of an error's text; the name of its class as well, if it is one word."""
    text = str(error).partition("\n")[0]
    return text if " " in text else f"{type(error).__name__} {text}".rstrip()


def load_listed(data: bytes, what: str, classes: Mapping[tuple[str, str], Any]) -> Any:
    """A pickle in which only the listed classes and functions may occur.

    Raises:
        CheckpointError: The pickle is damaged, or asks for another class.
    """

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in classes:
                return classes[module, name]
            raise CheckpointError(
                f"{what}: its pickle asks for {module}.{name}, which no such file needs; "
                "it is damaged or hostile"
            )

    try:
        return Reader(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{what}: not readable: {_first_line(error)}") from error
