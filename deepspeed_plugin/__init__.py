"""rankwise under DeepSpeed: importing this package makes its optimizers valid ``"type"`` values of the JSON."""

from __future__ import annotations

from deepspeed_plugin.registry import JSON_TYPES, initialize, is_registered, register, unregister, validate_config

__all__ = ["JSON_TYPES", "initialize", "is_registered", "register", "unregister", "validate_config"]

register()
