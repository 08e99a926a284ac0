"""DeepSpeed's `deepspeed.runtime`: the places that scripts import from."""
