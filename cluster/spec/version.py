"""Version of this code, even if it runs from a folder without being installed."""

VERSION = "0.1.0"
