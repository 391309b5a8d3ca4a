"""Training over devices: of this process, of one peer, of several, by the same loop.

::

    with mesh.train.ddp(devices) as strategy:
        mesh.train.fit(strategy, model, optimizer=..., loss=..., train=loader, epochs=10)

====================  ==================================================================
`strategy`            what a loop is written against, and the strategy for one device
`ddp`                 a replica on each device, gradients averaged
`sharded`             the same with the optimizer's state split
`buckets`             gradients in a few large tensors, on their way during the backward
`replicas`            copies of a model, and buffers that have to agree
`batches`             batches split by rows
`fit`                 a loop: epochs, validation, schedules, checkpoints, lost devices
`checkpoint`          states in files, without pickle
`artifacts`           metrics as a table and as a plot
====================  ==================================================================
"""

from __future__ import annotations

from mesh.train.checkpoint import load_checkpoint, save_checkpoint
from mesh.train.ddp import ddp
from mesh.train.errors import CheckpointError
from mesh.train.fit import EarlyStop, History, fit
from mesh.train.sharded import sharded_optimizer
from mesh.train.strategy import Strategy, single

__all__ = [
    "CheckpointError",
    "EarlyStop",
    "History",
    "Strategy",
    "ddp",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
    "sharded_optimizer",
    "single",
]
