"""Write the lock files beside this one: what the image installs, each file by its hash.

One set for what is always installed and one for each extra, all of the same versions. Needs uv on
the PATH (`pip install uv`) and an index. Who calls it: `make locks`.
"""

import subprocess
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
OF_TORCH = ["filelock", "jinja2", "networkx", "setuptools>=77", "sympy", "typing-extensions"]
"""What torch needs of other indexes than its own, and what installs us."""
OPTIONAL = PROJECT["optional-dependencies"]
EXTRAS = ("etcd", "s3", "gcs", "stacks", "traces")
BASE = PROJECT["dependencies"] + OPTIONAL["metrics"] + OPTIONAL["torch"]
SETS = {
    "base": [one for one in BASE if not one.startswith("torch")] + OF_TORCH,
    **{extra: OPTIONAL[extra] for extra in EXTRAS},
}
WHAT = {
    "base": "what zero-elastic and torch need, torch and its GPU libraries aside",
    **{extra: f"the extra {extra}" for extra in EXTRAS},
}
UV = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
UV += ["--generate-hashes", "--no-annotate", "--no-header"]


def compiled(wanted: list[str], *more: str) -> str:
    """The lock of some requirements."""
    done = subprocess.run(
        [*UV, *more, "-"], input="\n".join(wanted), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def main() -> None:
    """Solve for everything at once, then write each set with those versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as together:
        together.write(compiled([one for wanted in SETS.values() for one in wanted]))
        together.flush()
        for name, wanted in SETS.items():
            lock = compiled(wanted, "-c", together.name)
            head = f"# Made by `make locks`: {WHAT[name]}, each file by its hash.\n"
            (HERE / f"{name}.lock").write_text(head + lock)


if __name__ == "__main__":
    main()
