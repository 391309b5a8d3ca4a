"""Hosts and links of their own: network namespaces joined by veth pairs."""
