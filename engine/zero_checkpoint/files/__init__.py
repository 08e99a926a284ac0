"""The bytes of files: where they are, written durably and hashed, read in ranges."""
