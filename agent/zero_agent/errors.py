"""The error that ends an agent."""

from __future__ import annotations

from zero_contract.errors import ZeroError


class AgentFailed(ZeroError):
    """The agent itself cannot continue; `code` is its exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
