"""One file a revision; see the package above."""
