"""A module's parameters and gradients, in flat buffers that the ranks share."""
