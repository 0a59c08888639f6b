"""Version of this code, also when it runs from a folder without being installed."""

VERSION = "0.1.0"
