"""Imported first by the libraries that need torch: without it they fail with the line to type."""

from importlib.util import find_spec

from zero_contract.extras import remedy

if find_spec("torch") is None:
    raise ModuleNotFoundError(remedy("torch"), name="torch")
