"""The loss scale of fp16 training: a state machine without tensors.

The next state depends on the state and the overflow alone, so ranks that see the same overflows
have the same scale.

Source: the series is that of DeepSpeed's DynamicLossScaler: an overflow first uses up the
hysteresis, then halves the scale; `window` steps without overflow double it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_engine.config.schema import Fp16

_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleState:
    """The state of the machine between two steps."""

    scale: float
    hysteresis: int
    """The number of overflows until the scale falls, this one included."""
    step: int = 0
    """The number of steps, skipped ones included."""
    last_overflow: int = -1
    """The step of the last overflow; -1 before the first."""
    unanswered: int = 0
    """The number of overflows in a row after which nothing could be changed."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The rules of the machine; `after` is its transition."""

    initial: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    @classmethod
    def of(cls, fp16: Fp16) -> LossScaling:
        """The rules in a config."""
        if not fp16.enabled:
            return cls()
        if fp16.loss_scale:
            return cls(initial=fp16.loss_scale)
        return cls(
            initial=_FACTOR**fp16.initial_scale_power,
            dynamic=True,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )

    def begin(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(scale=self.initial, hysteresis=self.hysteresis)

    def to_json(self, state: ScaleState) -> dict[str, Any]:
        """A state as JSON, for a checkpoint."""
        return {"dynamic": self.dynamic, **dataclasses.asdict(state)}

    def resume(self, saved: Mapping[str, Any]) -> ScaleState:
        """The state of a checkpoint; its scale is used only if it is dynamic in both runs."""
        numbers = {key: value for key, value in saved.items() if key != "dynamic"}
        state = ScaleState(**numbers)
        # Steps and overflows are counted on in any case.
        if self.dynamic and saved["dynamic"]:
            return state
        return dataclasses.replace(state, scale=self.initial, hysteresis=self.hysteresis)

    def after(self, state: ScaleState, overflow: bool) -> tuple[ScaleState, str]:
        """The state after a step, and a sentence about the change; empty if there is none."""
        change, reason = self._change(state, overflow)
        # What changes scale or hysteresis is an answer: the next step may have no overflow.
        unanswered = state.unanswered + 1 if overflow and not change else 0
        last = state.step if overflow else state.last_overflow
        after = dataclasses.replace(
            state, step=state.step + 1, last_overflow=last, unanswered=unanswered, **change
        )
        return after, reason

    def _change(self, state: ScaleState, overflow: bool) -> tuple[dict[str, Any], str]:
        # Without a scale (fp32, bf16), or with a fixed one, skipped steps are counted only.
        if not self.dynamic:
            return {}, "there is no dynamic loss scale to lower" if overflow else ""
        if overflow:
            if state.hysteresis > 1:
                left = state.hysteresis - 1
                stays = f"loss scale {state.scale:g} stays, hysteresis {left} left"
                return {"hysteresis": left}, stays
            lower = max(state.scale / _FACTOR, self.minimum)
            # Also below the minimum: a checkpoint of another config may bring such a scale.
            if lower >= state.scale:
                return {}, f"the loss scale is at its minimum of {state.scale:g}"
            return {"scale": lower}, f"loss scale {state.scale:g} -> {lower:g}"
        stable = state.step - state.last_overflow - 1
        grows = stable > 0 and stable % self.window == 0
        change: dict[str, Any] = {}
        if grows or self.consecutive_hysteresis:
            change["hysteresis"] = self.hysteresis
        if not grows:
            return change, ""
        higher = state.scale * _FACTOR
        reason = f"loss scale {state.scale:g} -> {higher:g} after {stable} steps without overflow"
        return {**change, "scale": higher}, reason
