"""The version of this code, also where it runs from a folder without being installed."""

VERSION = "0.1.0"
