"""Tests of `mesh.train`."""
