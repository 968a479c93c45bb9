"""Importing this package makes rankwise's optimizers valid ``"type"`` values of a DeepSpeed JSON.

The code depends on these names of DeepSpeed's own:

======================== ==============================================================================================
module                   names of
======================== ==============================================================================================
``registry``             methods of the engine, its configuration and ZeRO-3's optimizer that are wrapped
``support``              settings and wrappers that are refused
``layouts``              ZeRO's optimizers: flat buffers, groups, positions, the loss scale
``state_access``         what DeepSpeed attaches to parameters, and its functions that read states through it
``sub_groups``           ZeRO-3's sub-groups
``auto_tp``              AutoTP: its layers and their shards (``affine_maps``)
``pipeline``, ``losses`` pipeline engines, and the loss that ``backward`` is given
``monitor``              the monitors that health is written to
``trainer_defaults``     what Hugging Face's Trainer fills into the JSON
``checkpoints.files``    files and keys of a checkpoint (``adamw_files``: of AdamW and Muon)
``checkpoints.loading``  what is known of the engine that loads
``checkpoints.by_name``  what the engine and its wrappers restore: counters, schedulers, the loss scale
``checkpoints.saving``   what ``save_checkpoint`` writes beside our states
======================== ==============================================================================================
"""

from __future__ import annotations

from deepspeed_plugin import _versions as _versions  # refuses earlier ones before their names are missed
from deepspeed_plugin.registry import JSON_TYPES, initialize, is_registered, register, unregister, validate_config

__all__ = ["JSON_TYPES", "initialize", "is_registered", "register", "unregister", "validate_config"]

register()
