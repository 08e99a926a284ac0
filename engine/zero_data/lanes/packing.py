"""Packing: samples of one length, made of documents.

Must always hold: every token of every document is in exactly one sample, and nothing is dropped;
the state has the documents that wait for their sample. A document that is cut, because it is longer
than a sample or ends in another one, is recorded with its part in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zero_contract.errors import ConfigError
from zero_data.lanes.adapters.find import source_of
from zero_data.lanes.source import Reader
from zero_data.ledger import Documents

_NO_LABEL = -100
"""What torch's cross entropy leaves out."""


class Packed(dict[str, Tensor]):
    """A sample, which also says what it was made of."""

    documents: Documents = ()


class Part(NamedTuple):
    """Some tokens of a document."""

    document: int
    begin: int
    tokens: Tensor


class Pack:
    """Samples of `length` tokens with position ids and labels that begin anew at each document.

    A sample has, of shape [length] and int64: `input_ids`; `labels`, which are -100 for padding and
    for the first token of a document, since the one before is of another; `position_ids`, from 0 in
    each document; `document_ids`, from 1, and 0 for padding. Attention must stay within a document:
    by `document_ids`, by `position_ids`, or by `cu_seqlens`.
    """

    def __init__(
        self,
        source: Any,
        length: int,
        *,
        how: Literal["first_fit", "chunk"] = "first_fit",
        tokens: Callable[[Any], Any] | None = None,
        pad: int = 0,
        bins: int = 16,
    ) -> None:
        """Pack a source, or a dataset.

        Args:
            source: The documents.
            length: Tokens of a sample.
            how: "chunk": documents one after the other, cut at the length. "first_fit": each
                document into the first of the open samples that has room, and only cut if it is
                longer than a sample.
            tokens: The token ids of a document, such as a tokenizer gives; by default its
                "input_ids", or itself.
            pad: The token that fills a sample.
            bins: Samples that are open at a time; a checkpoint contains them.

        Raises:
            ConfigError: The length or the number of bins is below 1, `how` is unknown, or the
                dataset cannot be read.
        """
        if how not in ("first_fit", "chunk") or length < 1 or bins < 1:
            raise ConfigError(
                f"Pack: length={length}, bins={bins}, how={how!r}; give at least 1 and 1, and "
                "first_fit or chunk"
            )
        self._source = source_of(source)
        self.length, self.how, self.tokens, self.pad, self.bins = length, how, tokens, pad, bins

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        inner = self._source.open(lane, lanes, epoch, state and state["inner"])
        return _Packing(self, inner, state or {"number": 0, "bins": [], "full": []})

    def tensor(self, document: Any) -> Tensor:
        """The tokens of a document."""
        given = self.tokens(document) if self.tokens else document
        if isinstance(given, dict):
            given = given["input_ids"]
        return torch.as_tensor(given, dtype=torch.int64).flatten()

    def sample(self, parts: Sequence[Part]) -> Packed:
        """A sample of some parts, padded to the length."""
        short = self.length - _size(parts)
        sizes = [len(part.tokens) for part in parts]
        sizes += [short] if short else []
        ids = torch.cat([*(part.tokens for part in parts), torch.full((short,), self.pad)])
        positions = torch.cat([torch.arange(size) for size in sizes])
        numbers = torch.arange(1, len(sizes) + 1)
        numbers[len(parts) :] = 0
        numbers = numbers.repeat_interleave(torch.tensor(sizes))
        labels = ids.masked_fill((positions == 0) | (numbers == 0), _NO_LABEL)
        packed = Packed(input_ids=ids, labels=labels, position_ids=positions, document_ids=numbers)
        packed.documents = tuple(
            (part.document, part.begin, part.begin + len(part.tokens)) for part in parts
        )
        return packed


def cu_seqlens(position_ids: Tensor) -> Tensor:
    """Where documents begin in a flattened batch, and its end: int32, as FlashAttention wants.

    Args:
        position_ids: Of packed samples, [length] or [batch, length].
    """
    flat = position_ids.flatten()
    begins = torch.nonzero(flat == 0).flatten()
    return torch.cat([begins, begins.new_tensor([len(flat)])]).to(torch.int32)


def _size(parts: Sequence[Part]) -> int:
    return sum(len(part.tokens) for part in parts)


class _Packing(Iterator[Any]):
    def __init__(self, pack: Pack, inner: Reader, state: dict[str, Any]) -> None:
        self._pack, self._inner = pack, inner
        self._number: int = state["number"]
        self._bins: list[list[Part]] = [[Part(*part) for part in each] for each in state["bins"]]
        self._full: list[list[Part]] = [[Part(*part) for part in each] for each in state["full"]]

    def __next__(self) -> Packed:
        place = self._chunk if self._pack.how == "chunk" else self._first_fit
        while not self._full:
            for document in self._inner:
                tokens = self._pack.tensor(document)
                if len(tokens):
                    place(Part(self._number, 0, tokens))
                self._number += 1
                break
            else:
                self._full, self._bins = self._bins, []
                if not self._full:
                    raise StopIteration
        return self._pack.sample(self._full.pop(0))

    def _chunk(self, part: Part) -> None:
        while len(part.tokens):
            begun = self._bins.pop() if self._bins else []
            now, part = _cut(part, self._pack.length - _size(begun))
            begun.append(now)
            whole = _size(begun) == self._pack.length
            (self._full if whole else self._bins).append(begun)

    def _first_fit(self, part: Part) -> None:
        while len(part.tokens) > self._pack.length:
            now, part = _cut(part, self._pack.length)
            self._full.append([now])
        room = self._pack.length - len(part.tokens)
        fits = next((each for each in self._bins if _size(each) <= room), None)
        if fits is None:
            # The fullest sample makes room: its padding is the least.
            if len(self._bins) == self._pack.bins:
                fullest = max(range(len(self._bins)), key=lambda number: _size(self._bins[number]))
                self._full.append(self._bins.pop(fullest))
            fits = []
            self._bins.append(fits)
        fits.append(part)
        if _size(fits) == self._pack.length:
            self._bins = [each for each in self._bins if each is not fits]
            self._full.append(fits)

    def state(self) -> dict[str, Any] | None:
        """See `Reader`."""
        inner = self._inner.state()
        if inner is None:
            return None

        def plain(groups: list[list[Part]]) -> list[list[tuple[Any, ...]]]:
            # A cut document is a view of the whole one, all of which would be stored.
            return [[(*part[:2], part.tokens.clone()) for part in parts] for parts in groups]

        return {
            "inner": inner,
            "number": self._number,
            "bins": plain(self._bins),
            "full": plain(self._full),
        }


def _cut(part: Part, at: int) -> tuple[Part, Part]:
    rest = Part(part.document, part.begin + min(at, len(part.tokens)), part.tokens[at:])
    return part._replace(tokens=part.tokens[:at]), rest
