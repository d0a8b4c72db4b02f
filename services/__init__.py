"""The services of Rootstock, their shared code, and the version of all of them."""

__version__ = "0.1.0"
