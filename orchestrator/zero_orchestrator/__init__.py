"""Job level: what is needed when no process of the job runs on this machine. No torch."""
