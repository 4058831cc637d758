"""The runner of batches as a Ray Serve deployment: one process, replaced when it dies.

Nothing asks it anything but for its health: what it works on lies in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve import logs
from serve.batch_api.records import Records
from serve.batch_api.runner import BatchRunner
from serve.batch_api.webhooks import Outbox, read_endpoints
from serve.orders import ImageBackend
from serve.settings import ServeSettings


class BatchReplica:
    def __init__(self, settings: ServeSettings, replicas: Sequence[Any]) -> None:
        """`replicas` are handles in the order of the settings' models."""
        logs.configure(settings.log_format)
        from serve.fleet.replicas import Replicas

        records = Records(settings.batches_dir)
        endpoints = read_endpoints(settings.webhooks)
        self.outbox = Outbox(records, endpoints)

        def backends() -> list[ImageBackend]:
            return [Replicas(handle) for handle in replicas]

        self.runner = BatchRunner(records, settings, backends, self.outbox)
        self.runner.start()
        self.outbox.start()

    async def check_health(self) -> None:
        """Ray asks, and replaces it when this raises."""
        if not self.runner.is_alive:
            raise RuntimeError("the runner of batches has ended")

    def __del__(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()
            self.outbox.close()
