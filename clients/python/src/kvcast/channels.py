"""Connections to one of several servers."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

import grpc

_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": True}}]})

_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.keepalive_time_ms", 10_000),  # the shortest interval that servers allow by default
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),  # larger than any response
    ("grpc.use_local_subchannel_pool", 1),  # so that another stream opens another connection, perhaps to another server
    ("grpc.enable_retries", 0),
    ("grpc.service_config", _SERVICE_CONFIG),  # a DNS name may have many addresses
)


@dataclasses.dataclass(frozen=True)
class Connection:
    """How to reach the servers."""

    target: str
    """One server or several that serve the same workers, separated by commas, such as "kvcast-0:50051,kvcast-1:50051"."""
    tls: bool = False
    """Whether to use TLS. It is used with ca, cert or credentials in any case."""
    ca: bytes | None = None
    """Certificates of authorities in PEM; None: those of the system."""
    cert: bytes | None = None
    key: bytes | None = None
    """The client's certificate and its key in PEM."""
    token: str = ""
    """Sent with each call; empty: none."""
    client_id: str = ""
    """Names the router for people, in kvcast top and the console: at most 128 bytes of printable ASCII."""
    timeout: float = 10.0
    """The deadline of a call in seconds, in which each server may be tried."""

    def __post_init__(self) -> None:
        if not all(self.targets):
            raise ValueError(f"target {self.target!r} is not allowed: want one or more servers, separated by commas")
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key are not allowed alone: want both")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}: want more than 0")

    @property
    def targets(self) -> list[str]:
        return self.target.split(",")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials of channels; None: no TLS."""
        if not (self.tls or self.ca or self.cert):
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


class Servers:
    """Chooses one of the servers: the first until it fails, and then the next. It is safe for concurrent use."""

    def __init__(self, connection: Connection, asynchronous: bool) -> None:
        self.connection = connection
        self._targets = connection.targets
        self._credentials = connection.credentials
        self._module: Any = grpc.aio if asynchronous else grpc
        self._lock = threading.Lock()
        self._current = 0  # grows when the server fails

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def current(self) -> int:
        """The number of the choice, for failed."""
        with self._lock:
            return self._current

    def open(self, choice: int) -> Any:
        """Returns a channel to the server of a choice. The caller closes it."""
        target = self._targets[choice % len(self._targets)]
        if self._credentials is None:
            return self._module.insecure_channel(target, options=_OPTIONS)
        return self._module.secure_channel(target, self._credentials, options=_OPTIONS)

    def failed(self, choice: int) -> None:
        """Makes later connections go to the next server, unless that has happened since the choice."""
        with self._lock:
            if self._current == choice:
                self._current += 1
