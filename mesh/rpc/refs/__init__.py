"""Remote references: a value stays at its owner, and lives as long as anybody refers to it.

====================  ==================================================================
`reference`           `RRef`: what programs have
`owned`               the owner's side: values, who holds them, leases
`holding`             the holders' side: what owners are told, and when
`passing`             a reference inside a message: who is told before it travels
`listing`             which there are, for people: ``mesh refs``
====================  ==================================================================
"""
