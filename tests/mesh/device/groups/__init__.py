"""Tests of groups of devices."""
