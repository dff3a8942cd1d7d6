"""What the flow needs from outside, as Protocols. Adapters implement them; `app` joins both."""
