"""Changes that no test can notice, and why."""

EQUIVALENT: dict[str, dict[str, str]] = {
    "zero_step.gradients.norm": {
        "max(0, 128 - total.bit_length()) // 2 => max(0, 128 - total.bit_length()) * 2": (
            "the root has more digits than are needed, and is rounded to the same number"
        ),
    },
    "zero_checkpoint.saving.commit": {
        "(round, step) >= newest => (round, step) > newest": "where they are equal, both are",
        "consensus.rank == COORDINATOR => consensus.rank != COORDINATOR": (
            "the rank whose log has the progress of a save that takes minutes"
        ),
        "ownership.written(root, name) => None": (
            "the manifest names the run as well; this spares reading it"
        ),
        "root.absolute() if isinstance(root, Path) else root => root if isinstance(root, Path) "
        "else root.absolute()": "ranks are threads of one process here, with one directory",
    },
}
"""Module -> change -> the reason."""
