"""The worker's place in its job: its process group, and the link to its agent."""
