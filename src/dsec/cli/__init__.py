"""The dsec command."""
