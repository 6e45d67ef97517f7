"""Dockerfiles: parsed, planned, and built step by step by a `build.Runner`."""
