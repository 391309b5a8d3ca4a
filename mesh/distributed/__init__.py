"""``torch.distributed`` on the mesh: the backend ``"mesh"``.

Importing this registers the backend. A group needs a node, given explicitly::

    import mesh.distributed
    dist.init_process_group("mesh", pg_options=mesh.distributed.Options(node=node), ...)

DistributedDataParallel and whatever else stands on process groups then run unmodified.
"""

from __future__ import annotations

from mesh.distributed.group import BACKEND, ProcessGroupMesh
from mesh.distributed.options import MeshNode, Options, use
from mesh.distributed.registration import register
from mesh.distributed.work import MeshWork

__all__ = ["BACKEND", "MeshNode", "MeshWork", "Options", "ProcessGroupMesh", "register", "use"]

register()
