"""Hooks on the gradients of a model, one module for each way to wrap it."""
