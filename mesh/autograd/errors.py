"""The branch of the exception tree that belongs to distributed autograd.

    MeshError
    └── RpcError
        ├── ContextGone     an autograd context that has ended, or never was
        └── BackwardError   a backward failed; names the node, and has what was raised as its cause

Both are ``RuntimeError`` too, with the words of ``torch.distributed.autograd``.
"""

from __future__ import annotations

from mesh.rpc.errors import RpcError

__all__ = ["BackwardError", "ContextGone"]


class ContextGone(RpcError):
    """There is no autograd context of that id here: it has ended, or never was."""

    code = "autograd-context"


class BackwardError(RpcError):
    """A backward failed. ``__cause__`` is what was raised, with the remote traceback as a note."""

    code = "backward"
