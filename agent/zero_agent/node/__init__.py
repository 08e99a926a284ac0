"""This node: its health, network, memory and processes, and the API of scripts to its agent."""
