"""A simulated cluster: the product's agents under one clock and one seed; see `__main__`."""
