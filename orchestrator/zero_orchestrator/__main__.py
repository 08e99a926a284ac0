"""`python -m zero_orchestrator`: as `zero-ctl`."""

from zero_orchestrator.start import ctl

ctl()
