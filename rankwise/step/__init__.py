"""One call of ``step()``, the same for every rule; states that can be undone, saved and restored; reports."""
