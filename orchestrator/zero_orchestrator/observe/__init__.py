"""The records of a job: written by its agents, read and judged by agents and `zero-ctl`."""
