"""`python -m zero_agent`."""

from zero_agent.cli import main

main()
