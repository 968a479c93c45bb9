"""One call of ``step()``, the same for every rule: what lies where, which rule it takes, states, reports."""
