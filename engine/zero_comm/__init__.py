"""The communication of the ranks of a job, and the worker's link to its agent.

The process group, collectives that add in one fixed order, waits that can be interrupted, deadlock
detection. It knows tensors and ranks, and nothing of models, optimizers or checkpoints.
"""
