"""Writes the packaged files anew."""

from pathlib import Path

from rankwise.configs.making import write

if __name__ == "__main__":
    write(Path(__file__).resolve().parent)
