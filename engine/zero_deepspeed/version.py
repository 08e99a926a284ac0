"""The version of DeepSpeed's API, which scripts and libraries compare with the one they need."""

__version__ = "0.19.8+zero.elastic"
