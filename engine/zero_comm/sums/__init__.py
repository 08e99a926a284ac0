"""The one order in which gradients are added, and who adds which of them."""
