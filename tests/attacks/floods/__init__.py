"""Floods from a process of their own, beside a transfer between two others."""
