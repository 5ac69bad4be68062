"""Answers of /v1/responses that later requests may refer to."""

import logging
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger("jaxllm.server")

_MAX_BYTES = 256 * 2**20
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (tenant TEXT, id TEXT, used INTEGER, body BLOB, UNIQUE (tenant, id));
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used);
CREATE TABLE IF NOT EXISTS totals (tenant TEXT PRIMARY KEY, number INTEGER, bytes INTEGER);
CREATE TRIGGER IF NOT EXISTS inserted AFTER INSERT ON responses BEGIN
    INSERT INTO totals VALUES (new.tenant, 1, length(new.body)) ON CONFLICT (tenant)
        DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON responses BEGIN
    UPDATE totals SET number = number - 1, bytes = bytes - length(old.body) WHERE tenant = old.tenant;
    DELETE FROM totals WHERE tenant = old.tenant AND number = 0;
END;
COMMIT;
"""
_DELETE = "DELETE FROM responses WHERE tenant = ? AND id = ? RETURNING id"
_USE = "UPDATE responses SET used = ? WHERE tenant = ? AND id = ?"
_HAS_TOO_MANY = "SELECT tenant FROM totals WHERE tenant = ? AND number > ?"
_TAKES_MOST = "SELECT tenant FROM totals WHERE (SELECT sum(bytes) FROM totals) > ? ORDER BY bytes DESC LIMIT 1"
_DELETE_OLDEST = """
DELETE FROM responses WHERE rowid = (SELECT rowid FROM responses WHERE tenant = ? ORDER BY used LIMIT 1)
"""


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """response: the answer as it was given.
    messages: the conversation up to and with it, as the chat template reads it, without the instructions.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Keeps of each tenant, which finds only its own, the `max_responses` that were used last. When all together take
    more than 256 MiB, the tenant that takes most loses its oldest. All are lost when the server stops.

    shared_folder: where the API workers of one server keep them together; None keeps them in this process.
    """

    def __init__(self, max_responses: int, shared_folder: Path | None = None, *, max_bytes: int = _MAX_BYTES) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        path = ":memory:" if shared_folder is None else shared_folder / "responses.sqlite"
        # Transactions are as short as one response, and nothing here has to survive the machine.
        self._database = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
        self._database.executescript(_SCHEMA).close()

    def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Keeps a response, in the place of an earlier one with its id. False, and a line in the log, if it cannot, as
        on a full disk."""
        row = (tenant, stored.response["id"], time.monotonic_ns(), msgspec.json.encode(stored))
        try:
            with self._database:  # commits, or rolls back
                self._run("BEGIN IMMEDIATE")
                self._run(_DELETE, *row[:2])
                self._run("INSERT INTO responses VALUES (?, ?, ?, ?)", *row)
                while found := (
                    self._run(_HAS_TOO_MANY, tenant, self.max_responses) or self._run(_TAKES_MOST, self._max_bytes)
                ):
                    self._run(_DELETE_OLDEST, *found)
        except sqlite3.Error as error:
            logger.error("response %s could not be kept: %s", row[1], error)
            return False
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None: it was never kept, was deleted, or had to make room."""
        row = self._run("SELECT body FROM responses WHERE tenant = ? AND id = ?", tenant, response_id)
        if row is None:
            return None
        with suppress(sqlite3.Error):  # The disk is full: it can be read all the same.
            self._run(_USE, time.monotonic_ns(), tenant, response_id)
        return msgspec.json.decode(row[0], type=StoredResponse)

    def delete(self, tenant: str, response_id: str) -> bool:
        """False: there is none."""
        return self._run(_DELETE, tenant, response_id) is not None

    def __len__(self) -> int:
        row = self._run("SELECT coalesce(sum(number), 0) FROM totals")
        assert row is not None
        return row[0]

    def close(self) -> None:
        self._database.close()

    def _run(self, command: str, *values: Any) -> tuple | None:
        """The first row of the result."""
        with closing(self._database.execute(command, values)) as cursor:
            return cursor.fetchone()
