"""Client of kvcast, which tells routers of LLM requests which engine holds which prefix.

Client is for threads, and kvcast.aio.Client for asyncio. Messages are those of the contract, in kvcast.v1.
"""

from kvcast.channels import Connection
from kvcast.client import Client
from kvcast.errors import (
    ClosedError,
    EndedError,
    IdleError,
    KvcastError,
    Reason,
    StatusError,
    ViolationError,
)
from kvcast.matcher import Matcher
from kvcast.matching import Match, MatchRequest, MatchResult, Outcome, Prompt, Routed, tokens_hashes
from kvcast.options import Filter, GapPolicy, Start, SubscribeOptions
from kvcast.position import Position
from kvcast.session import Interruption, Update
from kvcast.v1.event_pb2 import Tier
from kvcast.v1.worker_pb2 import DegradedReason, Trust
from kvcast.view import View

__all__ = [
    "Client",
    "ClosedError",
    "Connection",
    "DegradedReason",
    "EndedError",
    "Filter",
    "GapPolicy",
    "IdleError",
    "Interruption",
    "KvcastError",
    "Match",
    "MatchRequest",
    "MatchResult",
    "Matcher",
    "Outcome",
    "Position",
    "Prompt",
    "Reason",
    "Routed",
    "Start",
    "StatusError",
    "SubscribeOptions",
    "Tier",
    "Trust",
    "Update",
    "View",
    "ViolationError",
    "tokens_hashes",
]
