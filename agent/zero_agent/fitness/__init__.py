"""Whether this node is fit to take part."""
