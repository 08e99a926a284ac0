"""Node level: whatever touches a pid, a file descriptor or a signal. No torch."""
