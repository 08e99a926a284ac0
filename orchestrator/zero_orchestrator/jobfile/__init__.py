"""Job files: one YAML description of a job, and what each kind of cluster makes of it."""
