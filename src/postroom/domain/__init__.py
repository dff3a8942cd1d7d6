"""Values and state machines. Pure: nothing here reads a clock, makes an id or awaits."""
