"""Who may do what: principals and tokens."""
