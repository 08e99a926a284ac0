"""`zero-ctl launch`."""

from zero_orchestrator.start import run

run("zero_agent.launch.command")
