"""What a sandbox runs on: one narrow seam, several implementations."""
