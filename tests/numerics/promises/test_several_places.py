"""A drawn script saves to several places and loads from them, while the ranks of its job change.

It keeps the newest and the best, each N steps and at the ends of epochs, tells a client state, goes
back to the best in the middle, and loads it at its end. Whatever a rank's death, a join or a
departure does between two of these calls, the end, the best and what the script counts are those of
one process that nothing has happened to.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.numerics.promises.back_ends import OfEngine, Recipe
from tests.numerics.promises.test_combinations import SCRIPTS
from tests.numerics.promises.test_staying_anywhere import BEHIND, UNTIL, Life, staying
from tests.support.staying import Job
from tests.support.world import WorldPool
from zero_contract.worker import ENV_ROUND

MOMENTS = ["a draw", "a forward", "a backward", "a step", "between saves", "a load", BEHIND]
KINDS = ["ddp", "fsdp2", "stage0", "stage1", "stage2", "stage3", "offload"]
BEFORE = 2
"""Steps of a run before, which some scripts go on from."""

Habits = dict[str, Any]
Change = tuple[str, int, str, int]
"""What happens ("joins", "leaves" or "dies"), to which rank, at which moment of which step."""
Found = tuple[str, str, int, list[int]]
"""The hashes of the newest and of what the script ends with, its samples, what it has counted."""


class Keeper(Life):
    """A process of a script that saves to several places."""

    def __init__(self, recipe: Recipe, kind: str, root: str, habits: Habits, changes: Any) -> None:
        super().__init__(recipe, kind)
        self.habits, self.root = habits, Path(root)
        self.newest, self.best = str(self.root / "newest"), str(self.root / "best")
        if habits["best"] == "aside":
            self.best = self.newest
        self._changes: list[Change] = changes
        self.state: dict[str, Any] = {"behind": [], "back": False}
        if habits["state"] == "kept":
            self.session.keep_client_state(lambda: dict(self.state))

    @property
    def session(self) -> Any:
        return getattr(self.own, "engine", self.own.session)

    def reach(self, moment: str) -> None:
        number = int(os.environ.get(ENV_ROUND, "0")) - 1
        if 0 <= number < len(self._changes):
            what, rank, at, step = self._changes[number]
            here = moment, self.own.step - (moment in AFTER)
            if what == "dies" and rank == dist.get_rank() and here == (at, step - 1):
                os.kill(os.getpid(), signal.SIGKILL)

    # ---- what the script calls ----

    def save(
        self, directory: str, tag: str | None = None, aside: bool = False, **client: Any
    ) -> None:
        if self.habits["state"]:
            client |= self.state
        save = self.session.save_checkpoint if isinstance(self.own, OfEngine) else self.session.save
        save(directory, tag, client, save_latest=not aside)

    def load(self, directory: str, tag: str | None = None, how: str = "all") -> Any:
        if not isinstance(self.own, OfEngine):
            return self.session.load(directory, tag), self.session.client_state
        options = {"all": {}, "weights": {"load_module_only": True}}
        options["no optimizer"] = {"load_optimizer_states": False}
        return self.session.load_checkpoint(directory, tag, **options[how])

    def load_best(self, how: str) -> None:
        tag = "best" if self.habits["best"] in ("aside", "tagged") else None
        path, _ = self.load(self.best, tag, how)
        assert path is not None

    def save_best(self) -> None:
        if self.own.step in self.habits["better"]:
            tag = "best" if self.habits["best"] in ("aside", "tagged") else None
            metric = {"metric": self.own.step / 7} if self.habits["metric"] else {}
            self.save(self.best, tag, self.habits["best"] == "aside", **metric)
            self.reach("between saves")

    def save_newest(self) -> None:
        each = self.habits["each"]
        if self.habits["asks"]:
            due = (
                self.session.checkpoint_due if isinstance(self.own, OfEngine) else self.session.due
            )
            if not due(every_steps=each):
                return
        elif self.own.step % each:
            return
        self.save(self.newest)
        self.reach("between saves")

    def go_back(self) -> None:
        back = self.habits["back"]
        if back is None or self.state["back"] or self.own.step != back[0]:
            return
        self.state["back"] = self.habits["state"] != ""
        self.load_best(back[1])
        self.reach("a load")
        if self.habits["saves back"]:
            self.save(self.newest)

    def begin(self) -> None:
        path, client = self.load(self.newest)
        self.state |= client if self.habits["state"] else {}
        if path is None and self.habits["begins"]:
            assert self.load(str(self.root / "before"), None, self.habits["begins"])[0] is not None

    def behind(self, step: int) -> None:
        if dist.get_rank() == 0:
            with (self.root / "steps").open("a") as file:
                file.write(f"{self.own.step}\n")
        super().behind(step)
        self.state["behind"] = [*self.state["behind"], self.own.step]
        self.save_best()
        self.go_back()
        # Last: a worker that is asked to leave does so there, and another one goes on behind it.
        self.save_newest()

    # ---- the script ----

    def live(self, _: str = "") -> Found:
        own = self.own
        self.begin()
        while own.step < UNTIL:
            self.train_epoch()
            if self.habits["epoch"]:
                self.save(self.newest)
        ended, samples = own.hash(), self.cursor.samples
        self.load_best(self.habits["ends"])
        # Of a script that tells it.
        counted = self.state["behind"] if self.habits["state"] else []
        result = ended, own.hash(), samples, counted
        own.close()
        return result


AFTER = {BEHIND, "between saves", "a load"}
"""Moments at which the step has been counted."""


def kept(root: str, recipe: Recipe, kind: str, habits: Habits, changes: list[Change]) -> Found:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with recipe.within():
        return Keeper(recipe, kind, root, habits, changes).live()


def before(root: str, recipe: Recipe) -> None:
    """The run that some scripts go on from, with the newest weights of all."""
    with recipe.within():
        own = Life(recipe, "stage0").own
        own.train(BEFORE)
        own.save(f"{root}/before")
        own.close()


def listing(root: Path) -> list[str]:
    return sorted(each.name for each in (root / "before").iterdir())


def steps(root: Path) -> list[str]:
    return sorted((root / "steps").read_text().split())


def disturbed(job: Job, root: Path, changes: list[Change], in_place: bool) -> list[Found]:
    """What each process of the last round ends with."""
    job.memory = root / "memory"
    job.memory.mkdir()
    job.begin([], joining=3)
    for what, rank, _, step in changes:
        if what == "dies":
            job.run_on()
        else:
            job.ask_at(step)
        stay = job.parted()
        if stay is None:
            break
        world = len(job.members)
        wanted = {
            "joins": world + (world < 4),
            "leaves": max(1, world - 1),
            "dies": max(1, world - 1),
        }
        stay = [each for each in stay if what == "joins" or each != rank]
        stay = stay[: wanted[what]]
        job.begin(stay, joining=wanted[what] - len(stay))
    return [found for _, found in job.to_end()]


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["joins", "leaves", "dies"]),
        st.integers(0, 2),
        st.sampled_from(MOMENTS),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=2,
)
HABITS = st.fixed_dictionaries(
    {
        "each": st.integers(1, 4),
        "epoch": st.booleans(),
        "asks": st.booleans(),
        "best": st.sampled_from(["elsewhere", "aside", "tagged"]),
        "better": st.sets(st.integers(1, UNTIL)).map(lambda drawn: sorted({1, *drawn})),
        "metric": st.booleans(),
        "state": st.sampled_from(["", "given", "kept"]),
        "back": st.none()
        | st.tuples(st.integers(2, 6), st.sampled_from(["weights", "no optimizer", "all"])),
        "ends": st.sampled_from(["all", "weights"]),
        "begins": st.sampled_from(["", "", "all", "weights"]),
        "async": st.booleans(),
        "ram": st.booleans(),
    }
)


def possible(habits: Habits, kind: str, changes: list[Change], in_place: bool) -> Habits:
    """These habits, as far as the script can have them."""
    habits = {**habits, "saves back": any(what == "dies" for what, *_ in changes)}
    if not kind.startswith(("stage", "offload")):
        habits["begins"] = "all" if habits["begins"] else ""
        habits["back"] = habits["back"] and (habits["back"][0], "all")
        habits["ends"] = "all"
    if habits["back"] and (habits["back"][1] != "weights") and not habits["state"]:
        habits["back"] = None  # it would go back for ever
    if habits["begins"] == "all":
        habits["better"] = sorted({BEFORE + 1, *habits["better"]})
    return habits


def ends_alike(
    worlds: WorldPool,
    root: Path,
    recipe: Recipe,
    kind: str,
    habits: Habits,
    changes: list[Change],
    in_place: bool = False,
) -> None:
    habits = possible(habits, kind, changes, in_place)
    memory = {"ram": {}} if habits["ram"] else {}
    sections = {**recipe.sections, "checkpoint": {"async": habits["async"], **memory}}
    recipe = replace(
        recipe,
        sections={**sections, "elastic": {**sections.get("elastic", {}), "in_place": in_place}},
    )
    places = [root / "alone", root / "disturbed"]
    for place in places:
        worlds.run(1, before, str(place), recipe)
    reference = "stage0" if kind.startswith(("stage", "offload")) else "plain"
    (expected,) = worlds.run(1, kept, str(places[0]), recipe, reference, habits, [])
    was = listing(places[1])
    script = kept, str(places[1]), recipe, kind, habits, changes
    with contextlib.closing(Job(root, *script)) as job:
        found = disturbed(job, root, changes, in_place)
    assert found == [expected] * len(found)
    assert listing(places[1]) == was
    if not habits["saves back"]:
        assert steps(places[1]) == steps(places[0])


NONE: Habits = {
    "each": 3,
    "epoch": False,
    "asks": False,
    "best": "elsewhere",
    "better": [1, 4],
    "metric": False,
    "state": "",
    "back": None,
    "ends": "all",
    "begins": "",
    "async": False,
    "ram": False,
}
CASES: dict[str, tuple[Habits, list[Change]]] = {
    "the best in the step in which a worker leaves": ({}, [("joins", 0, "", 3)]),
    "the best aside, in that step": ({"best": "aside"}, [("joins", 0, "", 3)]),
    "the best, before a peer dies": ({"ram": True}, [("dies", 1, "between saves", 4)]),
    "what it has counted, where a peer dies": (
        {"state": "kept", "ram": True, "each": 4},
        [("dies", 1, BEHIND, 5)],
    ),
    "where it begins, and not where it has its first weights from": (
        {"begins": "all", "each": 9},
        [("leaves", 0, "", 3)],
    ),
    "where it saves, and not what it goes back to": (
        {"back": (4, "all"), "state": "kept", "each": 4},
        [("leaves", 0, "", 4)],
    ),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "stage1"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.corners(
    kind=["stage1"], in_place=[False], case=["the best in the step in which a worker leaves"]
)
def test_what_a_script_saves_is_there_whatever_happens_behind_a_step(
    worlds: WorldPool, tmp_path: Path, kind: str, case: str, in_place: bool
) -> None:
    habits, changes = CASES[case]
    recipe = Recipe(of_wrapper=())
    ends_alike(worlds, tmp_path, recipe, kind, {**NONE, **habits}, changes, in_place)


@pytest.mark.parametrize("how", ["weights", "no optimizer"])
@pytest.mark.corners(how=["weights"])
def test_a_worker_leaves_where_its_script_begins_whatever_it_has_loaded_a_part_of(
    worlds: WorldPool, tmp_path: Path, how: str
) -> None:
    recipe = Recipe(of_wrapper=())
    begins = {"begins": how, "each": 9}, [("leaves", 0, "", 3)]
    back = {"back": (4, how), "each": 4}, [("leaves", 0, "", 4)]
    for number, (habits, changes) in enumerate([begins, back]):
        root = tmp_path / str(number)
        root.mkdir()
        ends_alike(worlds, root, recipe, "stage1", {**NONE, "state": "kept", **habits}, changes)


@settings(max_examples=20, phases=[Phase.generate])
@given(
    script=SCRIPTS,
    kind=st.sampled_from(KINDS),
    habits=HABITS,
    changes=CHANGES,
    in_place=st.booleans(),
)
@pytest.mark.full
def test_any_script_with_several_places_ends_as_if_nothing_had_happened(
    worlds: WorldPool,
    tmp_path_factory: pytest.TempPathFactory,
    script: dict[str, Any],
    kind: str,
    habits: Habits,
    changes: list[Change],
    in_place: bool,
) -> None:
    root = tmp_path_factory.mktemp("places")
    # DDP exchanges by itself what is not used.
    assume(script["model"] != "seldom" or kind != "ddp" or not in_place)
    recipe = staying(script)
    ends_alike(
        worlds, root, recipe, kind, habits, sorted(changes, key=lambda each: each[3]), in_place
    )
