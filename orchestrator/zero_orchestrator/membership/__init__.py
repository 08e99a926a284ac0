"""Who takes part in a job, round by round."""
