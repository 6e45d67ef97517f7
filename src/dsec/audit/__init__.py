"""The audit record: who did what to which sandbox, and what misbehaved inside."""
