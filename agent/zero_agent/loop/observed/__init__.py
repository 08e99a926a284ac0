"""What this agent tells of its node, and of a job whose rank 0 is here."""
