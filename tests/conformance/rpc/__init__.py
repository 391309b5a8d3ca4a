"""torch's own suites for remote calls, loaded from the installed torch and run on the mesh.

Nothing of them lies in this repository. They are imported as they are; then every name in them, and
in the Python parts of ``torch.distributed`` that they use, which stands for something that the mesh
has as well, is made to stand for the mesh's: by identity, whatever it is called there
(`substitution`). So upstream's own helpers, such as ``rpc.api._all_gather``, run on the mesh, too.
What only upstream's C++ has and tests look at is expressed by what the mesh shows (`stand_ins`).

To add a suite: name it in `suites.SUITES`, with the module and class that it is, and, if it uses
names that are not replaced yet, a mapping of them in `suites.REPLACED`: upstream's dotted name, and
what stands in for it (``module:attribute``, imported once all tests are). Run it with ``python -m
tests.conformance.rpc SUITE [TEST ...]``; what can't pass goes into ``left_out.txt`` under its
reason, a line for each test, ``SUITE.test_name``; raise the number in ``test_rpc.LEAST``.
"""
