"""What a message may name. Every table is filled on this side; a name that is in none is refused.

====================  ==================================================================
`exposed`             functions and classes of the program that peers may call
`operators`           torch's operators, which they may call anyhow
`types`               dataclasses, named tuples, enumerations that travel by value
`targets`             what a request asks for, and what functions are called by
====================  ==================================================================
"""
