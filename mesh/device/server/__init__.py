"""The peer's side: sessions on the endpoint, and for each an executor process of its own.

====================  ==================================================================
`machine`             handles, templates, operations, quotas, poison: the executor's core
`executor`            the process around it: frames in, frames out, nothing else
`nursery`             starts executors by forking, and tells how they ended
`service`             sessions of peers: admission, limits, leases
====================  ==================================================================
"""
