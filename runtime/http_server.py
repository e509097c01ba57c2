"""The HTTP server: uvicorn, with an end that its clients and whoever stops it can rely on."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from types import FrameType
from typing import Any

import uvicorn

from replayssm.runtime.engine_loop import EngineLoop

logger = logging.getLogger("replayssm.server")
CLOSE_S = 1.0
"""For clients to read the errors that end their requests."""
HURRY_S = 3.0
"""From the second signal to the end of the process, whatever the engine computes meanwhile."""
TICK_S = 0.05


class HttpServer(uvicorn.Server):
    """Serves `app` over a loop. After a signal, running requests have `shutdown_timeout_s` seconds; then, or at the
    next signal, the loop stops and they end with an error.
    """

    def __init__(self, app: Any, loop: EngineLoop, host: str, port: int, shutdown_timeout_s: float) -> None:
        super().__init__(uvicorn.Config(app, host=host, port=port, log_config=None, access_log=False))
        self.exit_code = 0
        """Of the process: 0, or 128 plus the signal's number where requests were not given their time."""
        self._loop = loop
        self._timeout_s = shutdown_timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn would raise it again at the end, which would skip what its caller does behind it."""
        if not self.should_exit:
            self.should_exit = True
        elif not self.exit_code:
            self.exit_code = 128 + sig
            watchdog = threading.Timer(HURRY_S, os._exit, [self.exit_code])
            watchdog.daemon = True
            watchdog.start()
        else:
            os._exit(self.exit_code)

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more connections, and end when those that are open have closed."""
        late = asyncio.create_task(self._end_late_requests())
        await super().shutdown(sockets)
        late.cancel()

    async def _end_late_requests(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        if self._loop.scheduler.has_work:
            logger.info(
                "running requests have %g s to finish (--shutdown-timeout); a second signal ends them at once",
                self._timeout_s,
            )
        while time.monotonic() < deadline and not self.exit_code:
            await asyncio.sleep(TICK_S)
        logger.warning("%d connections are open: their requests end with an error", len(self.server_state.connections))
        await asyncio.to_thread(self._loop.stop)
        await asyncio.sleep(CLOSE_S)
        for connection in list(self.server_state.connections):  # of clients that read nothing
            connection.transport.abort()
