"""Tests mirror the tree; `tests.reference` is shared by all of them."""
