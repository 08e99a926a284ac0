"""The node level: starts, watches and stops this node's workers. Imports no torch.

A worker's own script may call `heartbeat`, `should_leave` and `leave`, and give `shield` to its
DataLoader, which is all that it needs of this package.
"""

from zero_agent.node.heartbeat import heartbeat
from zero_agent.node.leave_request import leave, should_leave
from zero_contract.notices import shield

__all__ = ["heartbeat", "leave", "shield", "should_leave"]
