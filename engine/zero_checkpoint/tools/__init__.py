"""`zero-ckpt`: looking into checkpoints, checking, comparing, converting and tidying them.

Nothing here starts a job, needs a GPU or joins a process group. Each command is a function that
returns a record of plain values, which `output` shows to people or prints as JSON.
"""
