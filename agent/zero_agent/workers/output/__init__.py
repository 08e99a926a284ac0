"""The output of the workers: its routes, its way to terminal and files, and the last of it."""
