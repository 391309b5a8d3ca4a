"""Arguments, results and exceptions as items, and back. No I/O.

====================  ==================================================================
`values`              what travels, and how it is written
`exceptions`          how what was raised comes back
`heads`, `patterns`   what messages say that is the same from call to call, kept as bytes
`pickled`             what old programs send, where both sides allow it
====================  ==================================================================
"""
