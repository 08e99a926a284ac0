"""The gradients of a step: where they are summed, in which order of exchanges, and their norm."""
