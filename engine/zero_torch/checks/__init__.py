"""Whether a script has changed what it gave, and the self-test of its model."""
