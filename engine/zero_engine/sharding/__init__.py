"""A module's parameters and gradients, in flat buffers that are sharded over the ranks."""
