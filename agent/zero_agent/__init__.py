"""The node level: starts, watches and stops this node's workers. Imports no torch.

A worker's own script may call `heartbeat`, `should_leave` and `leave`, which is all that it needs
of this package.
"""

from zero_agent.node.heartbeat import heartbeat
from zero_agent.node.leave_request import leave, should_leave

__all__ = ["heartbeat", "leave", "should_leave"]
