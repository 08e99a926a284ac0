"""`python -m zero_orchestrator`: as `zero-ctl`."""

from zero_orchestrator.cli import main

main()
