"""Measurements that `make bench` prints; none of them asserts a time."""
