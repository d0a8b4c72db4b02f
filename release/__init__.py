"""Builds what a release consists of; no part of the product."""
