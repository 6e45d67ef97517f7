"""The gateway: a process that resolves names for sandboxes and looks into their web connections.

It outlives a SIGKILL of the server, as sandboxes do: what they download goes on. Everything that it reads
comes from sandboxes or from the Internet, so it is a process of its own, with no privileges.
"""
