"""Finds the batches or jobs that have not ended, for the runner."""

from __future__ import annotations

import logging
from typing import Generic

from serve.batch_api.records import Records, W, path_of
from serve.errors import Problem

log = logging.getLogger(__name__)

POLL_S, POLL_BUCKET_S = 0.5, 5.0


class OpenRecords(Generic[W]):
    def __init__(self, records: Records, kind: type[W]) -> None:
        self.records, self.kind = records, kind
        self._ended, self._unreadable = set[str](), set[str]()

    @property
    def pause_s(self) -> float:
        """Seconds between two readings."""
        return POLL_BUCKET_S if "://" in self.records.place else POLL_S

    def read(self) -> list[W]:
        """Return the open records, the oldest first."""
        open_records = list[W]()
        for owner in self.records.owners(self.kind.folder):
            for id_ in self.records.ids(self.kind.folder, owner):
                if id_ in self._ended:
                    continue
                try:
                    record = self.records.work(self.kind, owner, id_)
                except Problem as error:
                    self._report(owner, id_, error)
                    continue
                if record is not None and record.is_ended:
                    self._ended.add(id_)
                elif record is not None:
                    open_records.append(record)
        return sorted(open_records, key=lambda record: record.arrived_s)

    def _report(self, owner: str, id_: str, error: Problem) -> None:
        if id_ in self._unreadable:
            return
        self._unreadable.add(id_)
        file = path_of(self.kind.folder, owner, id_)
        cause = " ".join(str(error.__cause__).split())[:150]
        message = "%s/%s cannot be read, so it never ends; delete the file (%s)"
        log.error(message, self.records.place, file, cause)
