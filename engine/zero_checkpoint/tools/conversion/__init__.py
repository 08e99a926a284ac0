"""Import and export: `zero-ckpt import` and `zero-ckpt export`, and the formats of others."""
