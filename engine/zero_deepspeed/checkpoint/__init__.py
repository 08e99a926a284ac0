"""DeepSpeed's `deepspeed.checkpoint`: tensors copied out of flat buffers."""
