"""The node level: starts, watches and stops this node's workers. Imports no torch.

A worker's own script may call `heartbeat`, `should_leave` and `leave`, which is all that it needs
of this package.
"""

from zero_agent.asking import leave, should_leave
from zero_agent.pulse import heartbeat

__all__ = ["heartbeat", "leave", "should_leave"]
