"""The contents of a checkpoint: tensors, their fragments in files, the manifest; plans of reads."""
