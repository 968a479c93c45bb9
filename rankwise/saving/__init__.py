"""Dictionaries of states: ``state_dict()`` and ``load_state_dict()``, on however many ranks."""
