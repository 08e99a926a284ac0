"""How much memory is left: of the machine, and up to the limit of each cgroup around a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_contract import kernel

MIB = 1 << 20
V1_UNLIMITED = str((1 << 63) - 4096)
CASES = {
    "no limit": ("0::/job/step", {"job/step": ("max", 3, 0)}, None),
    "its own": ("0::/job/step", {"job/step": (10 * MIB, 3 * MIB, 0)}, 7 * MIB),
    "of what is around it": (
        "0::/job/step",
        {"job/step": ("max", 1 * MIB, 0), "job": (10 * MIB, 8 * MIB, 0)},
        2 * MIB,
    ),
    "the smaller one": (
        "0::/job/step",
        {"job/step": (10 * MIB, 9 * MIB, 0), "job": (10 * MIB, 8 * MIB, 0)},
        1 * MIB,
    ),
    "with the page cache": ("0::/job", {"job": (10 * MIB, 9 * MIB, 5 * MIB)}, 6 * MIB),
    "used up": ("0::/job", {"job": (10 * MIB, 11 * MIB, 0)}, 0),
    "a container": ("0::/../..", {"": (10 * MIB, 3 * MIB, 0)}, 7 * MIB),
    "version 1": (
        "4:memory:/job/step",
        {"memory/job/step": (V1_UNLIMITED, 1 * MIB, 0), "memory/job": (10 * MIB, 8 * MIB, 0)},
        2 * MIB,
    ),
}


@pytest.mark.parametrize(("own", "groups", "left"), CASES.values(), ids=CASES)
def test_what_is_left_is_bounded_by_every_cgroup_around_a_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    groups: dict[str, tuple[object, int, int]],
    left: int | None,
) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    cgroups = tmp_path / "cgroups"
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if "memory:" in own
        else ("memory.max", "memory.current")
    )
    for path, (limit, used, cache) in groups.items():
        group = cgroups / path
        group.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, used), strict=True):
            (group / name).write_text(f"{value}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    monkeypatch.setattr(kernel, "CGROUPS", cgroups)
    monkeypatch.setattr(kernel, "OWN", tmp_path / "own")
    found = kernel.available_bytes()
    if left is None:
        assert found > 100 * MIB, "the machine's"
    else:
        assert found == left
