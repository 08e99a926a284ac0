"""What is in a checkpoint: tensors, their fragments in files, the manifest; what to read."""
