"""DSec: sandboxes for training and evaluating agents."""
