"""The ZeRO engine: DeepSpeed's API, one result at every world size and stage."""
