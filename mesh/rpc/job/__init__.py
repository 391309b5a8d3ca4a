"""A program as a worker of a job: what `init_rpc` makes of it.

====================  ==================================================================
`worker`              what the program is then
`roster`              who the others are: names, ranks, nodes, told through a c10d store
`ending`              how all of them end together
`options`             what `init_rpc` can be told
`backends`            which kinds of worker there are, and how programs register one
====================  ==================================================================
"""
