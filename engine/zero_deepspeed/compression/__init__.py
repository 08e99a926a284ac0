"""DeepSpeed's `deepspeed.compression`, of which scripts use the helpers alone."""
