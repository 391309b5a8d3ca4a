"""Collectives over devices: the peers' executors exchange among themselves, the client orders.

A *group* is a list of devices, each with its rank. Its *members* are the sessions that have them:
one executor each, with one rank or several. What the ranks of a member have is folded in its
process; members exchange by the algorithms of `mesh.collective`, through memory that they share
where they run on one host, and otherwise over the connections of their nodes.

====================  ==================================================================
`wire`                what client, nodes and executors say to each other about a group
`context`             `DistributedContext`: what programs call
`issuing`             an operation in the streams of several sessions, and its results
`forming`             a group's life on the client's side: formed, watched, left
`service`             the node: lets a session join a group, connects it with the others
`pipe`                bytes between an executor's socket and a stream to another node
`exchange`            the executor: messages among members, over a socket for each other one
`member`              the executor: groups, and their operations in order
`working`             what a member does for an operation
`local`               the same over devices of this process, without any of that
====================  ==================================================================

Nobody joins a group but a session whose client has asked, and no two nodes connect for one but by a
secret that the client has handed to both, beside what their own authorizers say of each other.
"""
