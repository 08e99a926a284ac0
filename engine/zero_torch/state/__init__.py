"""The state of a training as pieces of a checkpoint: tensors, and objects of the script."""
