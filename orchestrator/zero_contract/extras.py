"""Which extra of this project brings a library that is not installed.

Agents, `zero-ctl` and job files need few libraries, and no torch. All else is an extra: what is
missing is one error with the line to type.
"""

from __future__ import annotations

_EXTRAS = {
    "fsspec": "torch",  # torch itself needs it
    "gcsfs": "gcs",
    "numpy": "torch",
    "opentelemetry": "traces",
    "prometheus_client": "metrics",
    "s3fs": "s3",
    "safetensors": "torch",
    "starlette": "dashboard",
    "torch": "torch",
    "uvicorn": "dashboard",
}
"""Library, as it is imported -> the extra."""


def remedy(library: str) -> str:
    """`LIBRARY is not installed: pip install ...`; pip adds what an installed package lacks."""
    extra = _EXTRAS.get(library.partition(".")[0])
    package = f"'zero-elastic[{extra}]'" if extra else "zero-elastic"
    return f"{library} is not installed: pip install {package}"
