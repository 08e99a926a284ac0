"""Stages that compose sources: a shuffle buffer and a mixture.

Must always hold: what a stage yields depends on its seed, the lane, the epoch and the place alone,
never on random numbers of the process; its state is whole, with the samples that it holds back, so
the rest after a restore is the rest without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from zero_contract.errors import ConfigError
from zero_data.global_batch import mix
from zero_data.lanes.adapters.find import source_of
from zero_data.lanes.source import Reader

_UNIT = 1 << 64


class Shuffle:
    """Samples in a random order, from a buffer."""

    def __init__(self, source: Any, *, buffer: int, seed: int = 0) -> None:
        """Shuffle a source, or a dataset.

        Args:
            source: What is read.
            buffer: Samples that each lane holds; a checkpoint contains them.
            seed: Of the order.

        Raises:
            ConfigError: The buffer holds nothing, or the dataset cannot be read.
        """
        if buffer < 1:
            raise ConfigError(f"Shuffle: buffer={buffer} holds no sample; give 1 or more")
        self._source, self._buffer, self._seed = source_of(source), buffer, seed

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        inner = self._source.open(lane, lanes, epoch, state and state["inner"])
        return _Shuffling(inner, self._buffer, (self._seed, lane, epoch), state or {})


class _Shuffling(Iterator[Any]):
    def __init__(
        self, inner: Reader, size: int, key: tuple[int, ...], state: Mapping[str, Any]
    ) -> None:
        self._inner, self._size, self._key = inner, size, key
        self._held: list[Any] = list(state.get("held", ()))
        self._number: int = state.get("number", 0)

    def __next__(self) -> Any:
        for sample in self._inner:
            self._held.append(sample)
            if len(self._held) >= self._size:
                break
        if not self._held:
            raise StopIteration
        chosen = mix(*self._key, self._number) % len(self._held)
        self._number += 1
        self._held[chosen], self._held[-1] = self._held[-1], self._held[chosen]
        return self._held.pop()

    def state(self) -> dict[str, Any] | None:
        """See `Reader`."""
        inner = self._inner.state()
        if inner is None:
            return None
        return {"inner": inner, "held": list(self._held), "number": self._number}


class Mixture:
    """Samples of several sources, each chosen with its weight."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        when_exhausted: Literal["stop", "restart", "continue"] = "stop",
    ) -> None:
        """Mix sources, or datasets.

        Args:
            sources: By name, which the state contains.
            weights: By name; the chance that a sample is from this source, up to their sum.
            seed: Of the choices.
            when_exhausted: What a lane does when one of its sources has ended. "stop": its epoch
                ends. "restart": that source begins its next epoch, until each has ended once.
                "continue": the others go on until all have ended.

        Raises:
            ConfigError: A weight is missing or not positive, or a dataset cannot be read.
        """
        if sources.keys() != weights.keys() or not all(w > 0 for w in weights.values()):
            raise ConfigError(
                f"Mixture: sources are {sorted(sources)}, weights are {dict(weights)}; give each "
                "source a weight above 0"
            )
        if when_exhausted not in ("stop", "restart", "continue"):
            raise ConfigError(
                f"Mixture: when_exhausted={when_exhausted!r} is not stop, restart or continue"
            )
        self._sources = {name: source_of(source) for name, source in sources.items()}
        self.weights, self.seed, self.when_exhausted = dict(weights), seed, when_exhausted

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        return _Mixing(self, (lane, lanes, epoch), state)

    def begin(self, name: str, place: tuple[int, int, int], restarts: int, state: Any) -> Reader:
        """A source from its beginning, or a state."""
        lane, lanes, epoch = place
        again = mix(epoch, restarts) >> 34 if restarts else epoch  # an order of its own
        return self._sources[name].open(lane, lanes, again, state)


class _Mixing(Iterator[Any]):
    def __init__(
        self, mixture: Mixture, place: tuple[int, int, int], state: dict[str, Any] | None
    ) -> None:
        self._mixture, self._place = mixture, place
        state = state or {"number": 0, "inner": {}, "restarts": {}, "over": []}
        self._number: int = state["number"]
        self._restarts: dict[str, int] = dict.fromkeys(mixture.weights, 0) | state["restarts"]
        self._over: list[str] = list(state["over"])
        """Sources that give no more."""
        self._readers = {
            name: mixture.begin(name, place, self._restarts[name], state["inner"].get(name))
            for name in mixture.weights
        }

    def __next__(self) -> Any:
        ending = self._mixture.when_exhausted
        while len(self._over) < (1 if ending == "stop" else len(self._readers)):
            name = self._choose()
            for sample in self._readers[name]:
                self._number += 1
                return sample
            if ending == "restart":
                restarts = self._restarts[name] = self._restarts[name] + 1
                if all(self._restarts.values()):
                    self._over = list(self._readers)
                    continue
                self._readers[name] = self._mixture.begin(name, self._place, restarts, None)
                for sample in self._readers[name]:
                    self._number += 1
                    return sample
            # Of one that begins again, too: it has nothing for this lane.
            self._over.append(name)
        raise StopIteration

    def _choose(self) -> str:
        names = [name for name in self._readers if name not in self._over]
        weights = [self._mixture.weights[name] for name in names]
        lane, _, epoch = self._place
        left = mix(self._mixture.seed, lane, epoch, self._number) / _UNIT * sum(weights)
        for name, weight in zip(names, weights, strict=True):
            if left < weight:
                return name
            left -= weight
        return names[-1]

    def state(self) -> dict[str, Any] | None:
        """See `Reader`."""
        inner = {name: reader.state() for name, reader in self._readers.items()}
        if None in inner.values():
            return None
        return {
            "inner": inner,
            "number": self._number,
            "restarts": dict(self._restarts),
            "over": list(self._over),
        }
