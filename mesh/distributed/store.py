"""torch's ``Store`` on the mesh.

torch reaches it from C++, under two sets of names: ``deleteKey`` and the like in camelCase, the
rest in snake_case. Values are bytes and stay so: nothing of them is unpickled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from auth import MeshError
from mesh.distributed.options import MeshNode
from mesh.store import StoreClient
from transport import DeadlineExceeded

__all__ = ["MeshStore"]

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long to wait for keys, unless told otherwise; as torch's stores do."""

BATCH_BYTES = 512 << 10
"""Most bytes of values in one operation that sets several."""

_keep: list[MeshStore] = []
"""torch's C++ side holds on to a store, but not to its Python half."""


class MeshStore(Store):
    """The store of a job, for the thread that asks; see `mesh.store`.

    Args:
        node: this process's node.
        client: of the job, made for the node's endpoint.
        timeout: how long to wait for keys.

    Raises, all methods:
        DistStoreError: what was waited for did not come, or the node that keeps the store is out of
            reach or refuses. Its cause is the mesh's own error.
    """

    def __init__(
        self, node: MeshNode, client: StoreClient, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__()
        self._node = node
        self._client = client
        self._timeout = timeout
        _keep.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._do("set", keys=[key], values=[_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return a value, once there is one."""
        (value,) = self._wait_for("get", keys=[key])
        return bytes(value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return int(self._do("add", key=key, amount=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the present one is `expected`; return what is there afterwards."""
        before, after = _bytes(expected), _bytes(desired)
        return bytes(self._do("compare_set", key=key, expected=before, desired=after))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all of `keys` have values."""
        self._wait_for("wait", timeout, keys=list(keys))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` have values."""
        return bool(self._do("check", keys=list(keys)))

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return bool(self._do("delete", key=key))

    def num_keys(self) -> int:
        """Return how many keys have values."""
        return int(self._do("count"))

    def list_keys(self) -> list[str]:
        """Return all keys that have values."""
        return list(self._do("keys"))

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._do("append", key=key, value=_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, once all are there."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set values, as many at once as go into one message."""
        names: list[str] = []
        batch: list[bytes] = []
        for key, value in zip(keys, map(_bytes, values), strict=True):
            if batch and sum(map(len, batch)) + len(value) > BATCH_BYTES:
                self._do("set", keys=names, values=batch)
                names, batch = [], []
            names.append(key)
            batch.append(value)
        if batch:
            self._do("set", keys=names, values=batch)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Add a value to the end of a queue."""
        self._do("push", key=key, value=_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; without `block` there must be one."""
        return bytes(self._wait_for("pop", None if block else timedelta(0), key=key))

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        return int(self._do("length", key=key))

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for keys."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long to wait for keys."""
        return self._timeout

    def clone(self) -> MeshStore:
        """Return another store of the same job."""
        return MeshStore(self._node, self._client, self._timeout)

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # noqa: N815
    hasExtendedApi, setTimeout = has_extended_api, set_timeout  # noqa: N815
    queuePush, queuePop, queueLen = queue_push, queue_pop, queue_len  # noqa: N815
    compareSet, multiGet, multiSet = compare_set, multi_get, multi_set  # noqa: N815

    def _wait_for(self, operation: str, timeout: timedelta | None = None, **fields: Any) -> Any:
        limit = self._timeout if timeout is None else timeout
        return self._do(operation, limit.total_seconds(), **fields)

    def _do(self, operation: str, timeout: float = 0.0, **fields: Any) -> Any:
        ask = partial(self._client.do, operation, timeout=timeout, **fields)
        try:
            return self._node.portal.call(ask)
        except DeadlineExceeded as error:
            raise DistStoreError(f"wait timeout: {error}") from error
        except MeshError as error:
            raise DistStoreError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
