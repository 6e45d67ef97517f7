"""HTTP and WebSocket face of the platform."""
