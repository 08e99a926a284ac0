"""The agent's loop: the events it handles, and the decisions it makes."""
