"""Writes the packaged files anew."""

from pathlib import Path

from rankwise.configs import for_models, making

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    making.write(here, making.contents())
    making.write(here, for_models.contents())
