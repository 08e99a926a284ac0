"""The promises of this project for libraries with a training loop of their own.

Each module plugs `zero_torch.protect` into one library, under the name of that library. None has a
mechanism of its own: the library calls the loop's body, and `zero_torch.Run` has the data, the
gradients, the checkpoints and the end of a step. Whatever the library, the object is the same:
`run.global_step`, `run.loss`, `run.grad_norm`, `run.weight_hash()`, `run.ledger()`.
"""
