"""The program's side: a torch backend that sends operations on instead of running them.

====================  ==================================================================
`tensors`             plain tensors without memory, each storage with one handle at a peer
`session`             messages queued by any thread, requests answered; knows no network
`carrier`             a session's way to its peer, in an event loop: streams, reconnects
`entries`             templates: what is learned about an operation once, by meta tensors
`kernels`             what torch calls for each operator: look up an entry, send it
`capturing`           sequences of operations that are sent once and run by number
`moving`              large tensors, beside the operations
`special`             operators that are not sent as they are: copies, reads, new memory
`patches`             where torch takes it for granted that storages have memory
`autocast`            which operators lower their precision under ``torch.autocast``
`backend`             makes all of it known to torch, in programs that ask for a device
====================  ==================================================================
"""
