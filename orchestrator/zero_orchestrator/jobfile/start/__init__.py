"""A job is started on a kind of cluster, if nothing is known to keep it from running."""
