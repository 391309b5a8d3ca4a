"""The guided tour behind ``make demo``."""
