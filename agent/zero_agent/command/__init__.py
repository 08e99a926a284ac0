"""The command line of zero-agent, and the start of an agent from it."""
