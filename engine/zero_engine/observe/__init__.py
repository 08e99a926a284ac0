"""Reports of a run: log lines, monitors, operations; the memory that a config needs."""
