"""What a node does about cold layers: reads ahead what an earlier first run read, or notes what it reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsec.core.images import LayerRef
from dsec.layers import prefetch

log = logging.getLogger(__name__)


class Warmth:
    """Of one node. Any thread may call; nothing here raises, and no reading ahead is waited for."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        """Off: nothing is read ahead. What first runs read is noted all the same."""
        self.ahead_bytes = 0
        self._recording: dict[str, LayerRef] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="warmth")

    def mounted(self, layer: LayerRef) -> None:
        """The layer was mounted just now, and nothing has been read of it."""
        if layer.blobs:
            self._safely(self._mounted, layer)

    def first_result(self, digests: Sequence[str]) -> None:
        """A sandbox on these layers has had its first result."""
        with self._lock:
            layers = [layer for d in digests if (layer := self._recording.pop(d, None)) is not None]
        for layer in layers:
            self._threads.submit(self._safely, self._record, layer)

    def close(self, *, finish: bool = False) -> None:
        """finish: what is waiting is done first."""
        self._threads.shutdown(cancel_futures=not finish)

    def _safely(self, body: Callable[[LayerRef], None], layer: LayerRef) -> None:
        try:
            body(layer)
        except Exception as e:
            log.warning("layer %s: reading ahead: %s", layer.digest[:12], e)

    def _mounted(self, layer: LayerRef) -> None:
        hot = prefetch.load(_hot(layer))
        if hot is None:
            if prefetch.is_cold(layer):
                with self._lock:
                    self._recording[layer.digest] = layer
        elif self.enabled:
            self._threads.submit(self._safely, lambda _: self._ahead(layer, hot), layer)

    def _ahead(self, layer: LayerRef, hot: prefetch.Hot) -> None:
        self.ahead_bytes += prefetch.read_ahead(layer, hot)

    def _record(self, layer: LayerRef) -> None:
        hot = prefetch.record(layer)
        prefetch.save(_hot(layer), hot)
        log.info("layer %s: its first run read %d bytes", layer.digest[:12], hot.total)


def _hot(layer: LayerRef) -> Path:
    """Beside the layer in its store, for other nodes."""
    return Path(layer.path).parent.parent / "hot" / f"{layer.digest}.json"
