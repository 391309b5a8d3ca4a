"""The callee's side of `mesh.rpc.Agent`.

====================  ==================================================================
`service`             a call: found, given room, run, its result sent back
`prompt`              calls that are answered at once, in the event loop
`serve_stream`        a generator, run as far as its reader asks
`sources`             generators of either kind, and where they run
====================  ==================================================================
"""
