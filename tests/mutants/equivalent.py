"""Changes that no test can notice, and why."""

EQUIVALENT: dict[str, dict[str, str]] = {
    "zero_step.norm": {
        "max(0, 128 - total.bit_length()) // 2 => max(0, 128 - total.bit_length()) * 2": (
            "the root has more digits than are needed, and is rounded to the same number"
        ),
    },
}
"""Module -> change -> the reason."""
