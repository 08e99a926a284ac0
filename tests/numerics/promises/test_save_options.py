"""A save that one rank gives other options: all ranks do the same, or are told which rank it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.numerics.promises.back_ends import Recipe, training
from tests.support.inside import looking_often, persistence_of
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_contract.errors import ConfigError

REFUSED: list[tuple[str, Any, str, str]] = [
    ("blocking", True, "True", "None"),
    ("blocking", False, "False", "None"),
    ("save_latest", False, "False", "True"),
    ("exclude_frozen_parameters", True, "True", "False"),
]
"""An option, a value, and how the error writes it, and the default."""
RANK_0S: list[tuple[str, Any]] = [("tag", "mine"), ("client_state", {"epoch": 1})]
"""What counts as rank 0 gives it."""


@looking_often()
def save_with_one_apart(root: str, back_end: str, in_background: bool) -> list[object]:
    """What each save returns or says, and what this rank then knows of the script."""
    own = training(Recipe(sections={"checkpoint": {"async": in_background}}), back_end)
    script, found = persistence_of(own.session).script, list[object]()

    def save(**given: Any) -> None:
        own.train(own.step + 1)
        try:
            found.append(own.session.save(root, **given))
        except ConfigError as error:
            found.append(str(error).partition(": ")[2].partition(". ")[0])
        found.append((script.asks, script.has_state))

    for apart in (1, 0):
        is_apart = dist.get_rank() == apart
        for option, value, *_ in REFUSED:
            save(**{option: value} if is_apart else {})
        own.session.keep_client_state(dict if is_apart else None)
        save()
        own.session.keep_client_state(None)
        for option, value in RANK_0S:
            save(**{option: value} if is_apart else {})
        if is_apart:
            own.session.due(every_steps=1)
        save()
    own.close()
    return found


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("back_end", ["ddp", "fsdp2", "stage1", "stage3"])
@pytest.mark.corners(back_end=["ddp", "stage3"], in_background=[True])
def test_an_option_on_one_rank_is_an_error_of_all_that_names_it_or_counts_as_on_rank_0(
    worlds: WorldPool, tmp_path: Path, back_end: str, in_background: bool
) -> None:
    first, second = worlds.run(2, save_with_one_apart, str(tmp_path), back_end, in_background)
    assert first == second
    expected = list[object]()
    for apart in (1, 0):
        neither = (False, False)
        for option, _, theirs, usual in [*REFUSED, ("keep_client_state()", "", "True", "False")]:
            on_0, on_1 = (usual, theirs) if apart else (theirs, usual)
            expected += [f"{option} is {on_0} on rank 0, and {on_1} on rank 1", neither]
        knows = (False, apart == 0)
        expected += [True, neither, True, knows, True, (apart == 0, apart == 0)]
    assert first == expected
    saved = [one.manifest for one in reversed(find(tmp_path).candidates)]
    names = [f"global_step{one.step}" for one in saved]
    assert [one.tag for one in saved] == [*names[:3], "mine", *names[4:]]
    assert [one.meta["client"] for one in saved] == [*[{}] * 4, {"epoch": 1}, {}]
