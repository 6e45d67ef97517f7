"""libdsec: the SDK."""
