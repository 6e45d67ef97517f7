"""The edge: admission, lifecycle, operations and recovery on one node."""
