"""Messages, their codec, and the Bus."""
