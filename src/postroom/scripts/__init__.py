"""Transaction scripts: every durable decision, one function each.

A script is a plain synchronous function of a `ports.store.Tx` and values. It locks its session
first, reads what the decision needs, asks `domain` what follows, and writes that, once. It knows
no engine: both run the same scripts. A script may run twice and must give the same answer; how
each of them notices is said beside it.
"""
