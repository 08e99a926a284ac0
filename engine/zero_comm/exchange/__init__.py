"""Exchanges between ranks: transports, the order of issue, deadlock detection, waits."""
