"""The protocol between a runtime and its clients: what is said, and how it is framed."""
