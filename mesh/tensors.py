"""A node's tensors: the store, the tokens for it, and the service that peers use."""

from __future__ import annotations

from auth import Authorizer, TokenBook, TokenLimits
from tensor_bridge import Lanes, TensorService, TensorStore
from transport import Endpoint

__all__ = ["Tensors"]


class Tensors:
    """What a node that offers tensors holds."""

    def __init__(self) -> None:
        self.store = TensorStore()
        self.tokens = TokenBook(TokenLimits())

    def service(self, endpoint: Endpoint, authorizer: Authorizer, lanes: Lanes) -> TensorService:
        """Return what offers them on `endpoint`, for as long as it is entered."""
        return TensorService(endpoint, self.store, self.tokens, authorizer, lanes=lanes)

    def sizes(self) -> dict[str, int]:
        """Return how full the tables are."""
        nbytes, count = self.store.used()
        tokens = self.tokens.counts()
        return {
            "tensors": count,
            "tensor_bytes": nbytes,
            "tokens": tokens.live,
            "exposed_bytes": tokens.exposed_bytes,
        }
