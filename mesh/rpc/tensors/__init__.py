"""The tensors of a message: small ones travel in it, large ones beside it.

====================  ==================================================================
`carriage`            on their way, each large one on its own stream
`parts`               large ones as the callee keeps them, until they are fetched
`placement`           which devices they are put on where they arrive
`sizes`               how much memory a value keeps
====================  ==================================================================
"""
