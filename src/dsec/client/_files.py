"""placeholder"""

from dsec.client._http import Connection


class Files:
    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
