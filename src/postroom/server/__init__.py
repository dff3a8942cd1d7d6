"""The protocol's server: one `Connection` for each client, over standard input or a web socket."""
