"""`python -m zero_agent`."""

from zero_orchestrator.start import agent

agent()
