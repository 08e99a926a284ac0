"""What ranks tell each other: the process group, collectives in one order, waits that end."""
