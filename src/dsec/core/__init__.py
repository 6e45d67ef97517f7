"""Pure code: no I/O, no clock, no kernel."""
