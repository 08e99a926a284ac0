"""This node: its health, network, memory and processes, and what scripts ask of its agent."""
