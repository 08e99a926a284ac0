"""zero-agent: what was typed, and what it comes to."""
