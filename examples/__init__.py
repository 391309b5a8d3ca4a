"""Programs to read and to run; each one is also run by the tests."""
