"""Checks whether the Hugging Face hub can be reached before its library starts to retry."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""variables by which users decide themselves; HF_HUB_OFFLINE=0 skips the test of the connection"""
CONNECT_SECONDS = 2.0


@contextlib.contextmanager
def quick_hub() -> Iterator[str | None]:
    """While the hub cannot be reached its library uses its cache only. Yields the host that did not answer, or None.

    The library reads its variables when it is imported, so its settings are changed here, and put back afterwards.
    """
    from datasets import config
    from huggingface_hub import constants

    host = None if any(name in os.environ for name in OFFLINE) else unreachable(constants.ENDPOINT)
    if host is None:
        yield None
        return
    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield host
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def unreachable(address: str, seconds: float = CONNECT_SECONDS) -> str | None:
    """The host of an address (or of the proxy that leads there) if it takes no connection in time, else None."""
    place = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(place.scheme) or proxies.get("all")
    if proxy and place.hostname and not proxy_bypass(place.hostname):
        place = urlsplit(proxy if "//" in proxy else f"//{proxy}", scheme="http")
    host, port = place.hostname or "", place.port or (443 if place.scheme == "https" else 80)
    connected = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=seconds):
            connected.set()

    attempt = threading.Thread(target=connect, daemon=True)  # the name of a host may take longer than any timeout
    attempt.start()
    attempt.join(seconds)
    return None if connected.is_set() else host
