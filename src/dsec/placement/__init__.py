"""Where a sandbox goes."""
