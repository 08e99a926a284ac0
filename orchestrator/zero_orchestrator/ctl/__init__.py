"""`zero-ctl`: show the status and the events of jobs, and write operator requests."""
