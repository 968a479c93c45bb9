"""FSDP2 and everything else that hands parameters over as ``DTensor``: layouts from placements."""
