"""A DeepSpeed configuration as DeepSpeed itself reads it: comments, trailing commas, base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from rankwise.options.validation import OptionError

__all__ = ["read_config"]


def read_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of what ``deepspeed.initialize`` takes as ``config``.

    Args:
        config: A path, the content itself, or the JSON text in URL-safe base64, as launchers pass it on.

    Raises:
        OptionError: It is none of these, a key stands twice, or the JSON is broken; with the place.
    """
    if isinstance(config, Mapping):
        return config
    try:
        content = hjson.loads(_text(str(config)), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (OSError, ValueError) as error:
        raise OptionError(f"DeepSpeed configuration {_short(config)} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise OptionError(f"DeepSpeed configuration {_short(config)} holds no JSON object; enclose the keys in {{ }}")
    return content


def _text(config: str) -> str:
    try:
        found = Path(config).is_file()
    except OSError:  # a base64 text is too long for a file name
        found = False
    if found:
        return Path(config).read_text(encoding="utf-8")
    try:
        return base64.b64decode(config, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise FileNotFoundError("there is no such file, and it is no base64 text either") from None


def _short(config: str | Path) -> str:
    text = str(config)
    return repr(text if len(text) <= 200 else f"{text[:197]}...")
