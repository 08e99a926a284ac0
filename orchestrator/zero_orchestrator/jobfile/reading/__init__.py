"""A job file becomes a job, checked in its parts and as a whole."""
