"""The caller's side of `mesh.rpc.Agent`.

====================  ==================================================================
`asking`              a request, the way there and back, what comes of the answer
`quick`               the short way for threads, by memory that both processes have
`streams`             what a peer's generator yields, one item after another
====================  ==================================================================
"""
