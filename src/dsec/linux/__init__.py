"""The kernel in Python: one thin wrapper per system call."""
