"""Entry of the process; see main.py."""

from dsec.network.gateway.main import main

main()
